"""Malformed recipes: each is a ValueError that says where, what and what is allowed."""
# ruff: noqa: E501 (one case a line)

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest

from quantrot.recipe import MAX_BYTES, REQUIRED, SHIPPED, Int8Weights, load_recipe, parse_recipe

HEAD = b"description: x\n"
RULE = b"linear:\n  - match: down_proj\n"
ANY_BLOCK = r"allowed: full, or a whole number from 1 up, or a bound as '<=32'$"
ROTATION_KINDS = r"allowed: 'none', 'hadamard', 'random-hadamard', 'random-orthogonal' or 'learned'"
TOP_LEVEL = r"allowed: attention, description, kv_cache, linear, rotations, skip$"
SEED = r"a whole number from 0 to 2\^63 - 1 is needed$"
STRING = r"a string is needed, in quotes where it looks like a number$"
FORMATS = r"allowed: 'fp8', 'mxfp4', 'int8'"


def spec(text: bytes) -> bytes:
    return HEAD + b"rotations:\n  R1: " + text + b"\n"


def rule(text: bytes) -> bytes:
    return RULE + b"    " + text.replace(b"\n", b"\n    ") + b"\n"


FP8 = b"weights: {format: fp8, block: channel}"

# name, the recipe, what the message must match from its start
CASES = [
    # unknown keys, at each level
    ("unknown-top-level-key", HEAD + b"rotation: {}\n", r"r\.yaml:2: unknown key 'rotation'; allowed: attention, .*skip \(did you mean 'rotations'\?\)$"),
    ("unknown-rotation", HEAD + b"rotations: {R5: {kind: hadamard}}\n", r"r\.yaml:2: unknown key 'rotations\.R5'; allowed: R1, R2, R3, R4"),
    ("unknown-rotation-field", spec(b"{kind: hadamard, sed: 3}"), r"r\.yaml:3: unknown key 'rotations\.R1\.sed'; allowed: block, channels, kind, seed \(did you mean 'seed'\?\)$"),
    ("unknown-rule-key", rule(FP8 + b"\nactivation: {format: none}"), r"r\.yaml:4: unknown key 'linear\.0\.activation'; allowed: activations, hadamard, match, weights \(did you mean 'activations'\?\)$"),
    ("unknown-weights-key", rule(b"weights:\n  format: fp8\n  block: channel\n  scale_rul: exact"), r"r\.yaml:6: unknown key 'linear\.0\.weights\.scale_rul'; allowed: block, fallback, format, rounding, scale_rule \(did you mean 'scale_rule'\?\)$"),
    ("unknown-activations-key", rule(FP8 + b"\nactivations: {format: fp8, block: token, group: 3}"), r"r\.yaml:4: unknown key 'linear\.0\.activations\.group'; allowed: block, format, scale_rule$"),
    ("key-named-like-a-format", HEAD + b"fp8: {}\n", r"r\.yaml:2: unknown key 'fp8'; allowed: attention, "),
    ("number-as-key", HEAD + b"1: 2\n", rf"r\.yaml:2: unknown key '1'; {TOP_LEVEL}"),
    ("truth-as-key", HEAD + b"rotations: {true: {kind: none}}\n", r"r\.yaml:2: unknown key 'rotations\.True'; allowed: R1, R2, R3, R4"),
    ("number-as-weights-key", rule(b"weights: {format: mxfp4, 5: 6}"), r"r\.yaml:3: unknown key 'linear\.0\.weights\.5'; allowed: fallback, format, rounding, scale_rule$"),
    ("unprintable-key", b"? 0x" + b"f" * 8000 + b"\n: 1\n", r"r\.yaml:1: unknown key 'a number of thousands of digits'; allowed: "),
    # wrong words
    ("rotation-kind", spec(b"{kind: hadamrd}"), rf"r\.yaml:3: rotations\.R1\.kind is 'hadamrd'; {ROTATION_KINDS} \(did you mean 'hadamard'\?\)$"),
    ("rotation-kind-a-list", spec(b"{kind: [hadamard]}"), rf"r\.yaml:3: rotations\.R1\.kind is \['hadamard'\]; {ROTATION_KINDS}$"),
    ("rotation-without-kind", spec(b"{block: 32}"), r"r\.yaml:3: rotations\.R1\.kind is missing; it has no default$"),
    ("weights-rounding", rule(b"weights: {format: mxfp4, rounding: gtpq}"), r"r\.yaml:3: linear\.0\.weights\.rounding is 'gtpq'; allowed: 'nearest' or 'gptq' \(did you mean 'gptq'\?\)$"),
    ("weights-format", rule(b"weights: {format: mxfp5}"), rf"r\.yaml:3: linear\.0\.weights\.format is 'mxfp5'; {FORMATS} \(did you mean 'mxfp4'\?\)$"),
    ("weights-format-none", rule(b"weights: {format: none}"), rf"r\.yaml:3: linear\.0\.weights\.format is 'none'; {FORMATS}$"),
    ("weights-format-missing", rule(b"weights: {block: channel}"), r"r\.yaml:3: linear\.0\.weights needs a format; write e\.g\. \{format: fp8, \.\.\.\}$"),
    ("weights-missing", RULE, r"r\.yaml:2: linear\.0\.weights is missing; it has no default$"),
    ("match-missing", b"linear:\n  - weights: {format: mxfp4}\n", r"r\.yaml:2: linear\.0\.match is missing; it has no default$"),
    ("match-empty", b"linear:\n  - {match: '', weights: {format: mxfp4}}\n", r"r\.yaml:2: linear\.0\.match is ''; a linear's name or a glob is needed, as down_proj or '\*'$"),
    ("match-a-number", b"linear:\n  - {match: 3, weights: {format: mxfp4}}\n", rf"r\.yaml:2: linear\.0\.match is 3; {STRING}"),
    ("scale-rule", rule(b"weights: {format: mxfp4, scale_rule: evn}"), r"r\.yaml:3: linear\.0\.weights\.scale_rule: scale_rule is 'evn'; allowed: floor, even, rceil, quest, mse \(did you mean 'even'\?\)$"),
    ("activations-off", rule(b"weights: {format: mxfp4}\nactivations: off"), r"r\.yaml:4: linear\.0\.activations is False; none or a mapping \(key: value\) is needed$"),
    ("absmax34-weights", rule(b"weights: {format: mxfp4, scale_rule: absmax34}"), r"r\.yaml:3: linear\.0\.weights\.scale_rule: scale_rule absmax34 .*Allowed: floor, even, rceil, quest, mse$"),
    ("absmax34-activations", rule(b"weights: {format: mxfp4}\nactivations: {format: mxfp4, scale_rule: absmax34}"), r"r\.yaml:4: linear\.0\.activations\.scale_rule: scale_rule absmax34 .*Allowed: floor, even, rceil, quest, mse$"),
    ("hadamard-width", rule(b"weights: {format: mxfp4}\nhadamard: 16"), r"r\.yaml:4: linear\.0\.hadamard is 16; allowed: 'none', 32, 64 or 128$"),
    ("fallback", rule(b"weights: {format: int8, group: 128, fallback: keeep}"), r"r\.yaml:3: linear\.0\.weights\.fallback is 'keeep'; allowed: 'channel' or 'keep' \(did you mean 'keep'\?\)$"),
    ("int8-group", rule(b"weights: {format: int8, group: 32}"), r"r\.yaml:3: linear\.0\.weights\.group is 32; allowed: 64, 128 or 'channel'$"),
    ("attention", HEAD + b"attention: fp16\n", r"r\.yaml:2: attention is 'fp16'; allowed: 'bf16' or 'fp8'"),
    ("kv-cache", HEAD + b"kv_cache: int3\n", r"r\.yaml:2: kv_cache is 'int3'; allowed: 'bf16', 'fp8' or 'int4' \(did you mean 'int4'\?\)$"),
    # wrong types
    ("rotations-empty", HEAD + b"rotations:\n", r"r\.yaml:2: rotations is None; a mapping \(key: value\) is needed$"),
    ("rotation-a-word", spec(b"hadamard"), r"r\.yaml:3: rotations\.R1 is 'hadamard'; a mapping \(key: value\) is needed$"),
    ("weights-a-word", rule(b"weights: fp8"), r"r\.yaml:3: linear\.0\.weights is 'fp8'; a mapping \(key: value\) is needed$"),
    ("skip-a-word", HEAD + b"skip: lm_head\n", r"r\.yaml:2: skip is 'lm_head'; a list is needed$"),
    ("skip-of-numbers", HEAD + b"skip:\n  - lm_head\n  - 3\n", rf"r\.yaml:4: skip\.1 is 3; {STRING}"),
    ("linear-a-mapping", HEAD + b"linear: {match: down_proj}\n", r"r\.yaml:2: linear is \{'match': 'down_proj'\}; a list is needed$"),
    ("description-a-number", b"\ndescription: 3\n", rf"r\.yaml:2: description is 3; {STRING}"),
    # blocks, seeds, numbers
    ("fp8-block", rule(b"weights: {format: fp8, block: [64, 64]}"), r"r\.yaml:3: linear\.0\.weights\.block: block is \[64, 64\]; allowed: channel, \[128, 128\], \[256, 256\]$"),
    ("fp8-block-of-three", rule(b"weights: {format: fp8, block: [128, 128, 1]}"), r"r\.yaml:3: linear\.0\.weights\.block: block is \[128, 128, 1\]; allowed: channel, \[128, 128\], \[256, 256\]$"),
    ("fp8-block-a-number", rule(b"weights: {format: fp8, block: 128}"), r"r\.yaml:3: linear\.0\.weights\.block: block is 128; allowed: channel, "),
    ("fp8-block-misspelt", rule(b"weights: {format: fp8, block: chanel}"), r"r\.yaml:3: linear\.0\.weights\.block: block is 'chanel'; allowed: .* \(did you mean 'channel'\?\)$"),
    ("int8-group-missing", rule(b"weights: {format: int8}"), r"r\.yaml:3: linear\.0\.weights\.group is missing; it has no default; allowed: channel, 64, 128$"),
    ("fp8-block-missing", rule(b"weights: {format: fp8}"), r"r\.yaml:3: linear\.0\.weights\.block is missing; it has no default; allowed: channel, \[128, 128\], \[256, 256\]$"),
    ("fp8-activation-block", rule(FP8 + b"\nactivations: {format: fp8, block: [1, 64]}"), r"r\.yaml:4: linear\.0\.activations\.block: block is \[1, 64\]; allowed: token, \[1, 128\], \[1, 256\], \[128, 128\], \[256, 256\]$"),
    *((f"block-{name}", spec(b"{kind: hadamard, block: %s}" % text), rf"r\.yaml:3: rotations\.R1\.block: block is {shown}; {ANY_BLOCK}") for name, text, shown in [
        ("zero", b"0", "0"), ("negative", b"-4", "-4"), ("half", b"half", "'half'"), ("float", b"32.0", r"32\.0"),
        ("true", b"true", "True"), ("null", b"", "None"), ("bound-zero", b"'<=0'", "'<=0'"), ("bound-above", b"'>=32'", "'>=32'"), ("nan", b".nan", "nan"), ("huge", b"9" * 400, "9{80}"),
        ("unprintable", b"0x" + b"f" * 8000, "a number of thousands of digits"),
    ]),
    ("seed-negative", spec(b"{kind: random-hadamard, seed: -1}"), rf"r\.yaml:3: rotations\.R1\.seed is -1; {SEED}"),
    ("seed-a-word", spec(b"{kind: random-hadamard, seed: abc}"), rf"r\.yaml:3: rotations\.R1\.seed is 'abc'; {SEED}"),
    ("seed-float", spec(b"{kind: random-hadamard, seed: 1.5}"), rf"r\.yaml:3: rotations\.R1\.seed is 1\.5; {SEED}"),
    ("seed-true", spec(b"{kind: random-hadamard, seed: true}"), rf"r\.yaml:3: rotations\.R1\.seed is True; {SEED}"),
    ("seed-nan", spec(b"{kind: random-hadamard, seed: .nan}"), rf"r\.yaml:3: rotations\.R1\.seed is nan; {SEED}"),
    ("seed-infinite", spec(b"{kind: random-hadamard, seed: .inf}"), rf"r\.yaml:3: rotations\.R1\.seed is inf; {SEED}"),
    ("seed-huge", spec(b"{kind: random-hadamard, seed: 9223372036854775808}"), rf"r\.yaml:3: rotations\.R1\.seed is 9223372036854775808; {SEED}"),
    ("seed-of-5000-digits", spec(b"{kind: random-hadamard, seed: " + b"9" * 5000 + b"}"), r"r\.yaml: not valid YAML: Exceeds the limit \(4300 digits\)"),
    # what does not go together
    ("int8-with-activations", rule(b"weights: {format: int8, group: 128}\nactivations: {format: mxfp4}"), r"r\.yaml:2: linear\.0: int8 weights do not go with mxfp4 activations; allowed: none$"),
    ("fp8-with-mxfp4-activations", rule(FP8 + b"\nactivations: {format: mxfp4}"), r"r\.yaml:2: linear\.0: fp8 weights do not go with mxfp4 activations; allowed: none, fp8$"),
    ("online-block-of-one", HEAD + b"rotations: {R3: {kind: hadamard, block: 1}}\n", r"r\.yaml:2: rotations: R3\.block is 1, which turns nothing .*; use kind: none$"),
    ("online-random-orthogonal", HEAD + b"rotations: {R4: {kind: random-orthogonal}}\n", r"r\.yaml:2: rotations: R4 runs online, .*; use hadamard or random-hadamard$"),
    # YAML that is broken or clever
    ("duplicate-key", b"skip: []\nlinear: []\nskip: []\n", r"r\.yaml:3: 'skip' is given twice \(first on line 1\); keep one$"),
    ("duplicate-nested-key", spec(b"{kind: hadamard,\n    kind: none}"), r"r\.yaml:4: 'kind' is given twice \(first on line 3\); keep one$"),
    ("alias", b"skip: &a [lm_head]\nlinear: *a\n", r"r\.yaml:2: aliases \(\*name\) are not allowed; write the value$"),
    ("alias-bomb", b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", r"r\.yaml:2: aliases \(\*name\) are not allowed"),
    ("merge-key", b"skip: []\n<<: {skip: 3}\n", r"r\.yaml:2: merge keys \(<<\) are not allowed; write the keys themselves$"),
    ("python-tag", HEAD + b"skip: !!python/object/apply:os.system ['true']\n", r"r\.yaml:2: tags are not allowed \(here 'tag:yaml\.org,2002:python/object/apply:os\.system'\); write the plain value$"),
    ("bool-tag", b"description: !!bool x\n", r"r\.yaml:1: tags are not allowed \(here 'tag:yaml\.org,2002:bool'\)"),
    ("timestamp-tag", b"description: !!timestamp x\n", r"r\.yaml:1: tags are not allowed"),
    ("impossible-date", HEAD + b"skip: [2020-13-45]\n", r"r\.yaml: not valid YAML: month must be in 1\.\.12$"),
    ("tab", b"rotations:\n\tR1: {kind: hadamard}\n", r"r\.yaml:2: not valid YAML: found character '\\t' that cannot start any token$"),
    ("brace-not-closed", b"skip: []\nrotations: {R1: {kind: hadamard}\n", r"r\.yaml:3: not valid YAML: expected ',' or '}'"),
    ("bracket-too-many", b"skip: [lm_head]]\n", r"r\.yaml:1: not valid YAML: expected <block end>, but found '\]'$"),
    ("two-documents", b"skip: []\n---\nskip: []\n", r"r\.yaml:2: not valid YAML: expected a single document in the stream, but found another document$"),
    ("list-as-key", b"skip: []\n[1, 2]: 3\n", r"r\.yaml:2: not valid YAML: found unhashable key$"),
    ("null-byte", b"skip: []\ndescription: a\x00b\n", r"r\.yaml:2: not valid YAML: character 0x0 is not allowed$"),
    ("control-character", b"skip: []\ndescription: a\x07b\n", r"r\.yaml:2: not valid YAML: character 0x7 is not allowed$"),
    ("half-a-surrogate", HEAD + b'skip: ["\\ud800"]\n', r"r\.yaml:2: '\\ud800' holds half of a surrogate pair; write the character itself$"),
    ("latin-1", b"description: caf\xe9\n", r"r\.yaml: not UTF-8 text \(invalid continuation byte at byte 16\)$"),
    ("utf-16", "skip: []\n".encode("utf-16"), r"r\.yaml: not UTF-8 text \(invalid start byte at byte 0\)$"),
    ("empty", b"", r"r\.yaml: a recipe is a mapping with the keys description, rotations, linear, skip, attention, kv_cache$"),
    ("only-a-comment", b"# nothing\n", r"r\.yaml: a recipe is a mapping with the keys "),
    ("list-at-top", b"- {match: down_proj}\n", r"r\.yaml: a recipe is a mapping with the keys "),
    ("word-at-top", b"mxfp4\n", r"r\.yaml: a recipe is a mapping with the keys "),
    ("deep-flow-nesting", b"linear: " + b"[" * 1000 + b"]" * 1000, r"r\.yaml: nested too deeply to be a recipe$"),
    ("deep-block-nesting", b"skip:\n" + b"- " * 3000 + b"a\n", r"r\.yaml: nested too deeply to be a recipe$"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_malformed_recipe_says_where_and_what_is_allowed(text, message):
    with pytest.raises(ValueError) as caught:
        parse_recipe(text, "r.yaml")
    assert type(caught.value) is ValueError
    assert re.match(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)


@pytest.mark.parametrize("none", [b"none", b"{format: none}"])
def test_activations_may_be_none_in_a_word(none):
    recipe = parse_recipe(rule(FP8 + b"\nactivations: " + none), "r.yaml")
    assert recipe.linear == parse_recipe(rule(FP8), "r.yaml").linear


def test_every_error_of_a_recipe_is_reported_at_once():
    text = b"""\
description: many errors
rotations:
  R1: {kind: hadamrd}
  R2: {kind: hadamard, block: 0}
linear:
  - {match: down_proj, weights: {format: fp8, block: [64, 64]}}
  - {match: q_proj, weights: {format: mxfp4}, hadamrd: 32}
skipp: []
"""
    with pytest.raises(ValueError) as caught:
        parse_recipe(text, "r.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in sorted(lines)] == [f"r.yaml:{i}" for i in (3, 4, 6, 7, 8)]


def test_recipe_without_a_file_names_the_field_and_not_a_line():
    with pytest.raises(ValueError, match=r"^recipe: rotations\.R1\.kind is 'hadamrd'; .*did you mean 'hadamard'\?"):
        load_recipe({"rotations": {"R1": {"kind": "hadamrd"}}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "quarot-mxfp",
            r"recipe 'quarot-mxfp' is neither a file nor a shipped recipe \(did you mean 'quarot-mxfp4'\?\)",
        ),
        (
            "nonsense!",
            r"recipe 'nonsense!' is neither a file nor a shipped recipe; shipped: fp8-attention, .*trained-mxfp4$",
        ),
        ("", r"recipe '' is neither a file nor a shipped recipe; shipped: "),
        ("a\0b", r"recipe 'a\\x00b' is neither a file nor a shipped recipe"),
    ],
)
def test_recipe_that_does_not_exist_offers_the_shipped_ones(name, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(name)


def test_what_a_missing_field_may_be_is_taken():
    assert set(REQUIRED["weights.group"]) == set(get_args(Int8Weights.model_fields["group"].annotation))
    for field, allowed in REQUIRED.items():
        where, name = field.split(".")
        for value in allowed:
            shown = list(value) if isinstance(value, tuple) else value
            given = {"format": "int8" if name == "group" else "fp8", name: shown}
            weights = {"weights": {"format": "fp8", "block": "channel"}}
            load_recipe({"linear": [{"match": "*", **weights, where: given}]})


def test_a_recipe_comes_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "recipe")
    text = (SHIPPED / "fp8-block.yaml").read_bytes()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit((tmp_path / "recipe").write_bytes, text)
        assert load_recipe(tmp_path / "recipe").model_dump() == load_recipe("fp8-block").model_dump()
        writing.result()
        writing = thread.submit((tmp_path / "recipe").write_bytes, b" " * (MAX_BYTES + 1))
        with pytest.raises(ValueError, match=f"recipe: {MAX_BYTES + 1} bytes; a recipe has at most {MAX_BYTES}"):
            load_recipe(tmp_path / "recipe")
        writing.result()


def test_directory_is_no_recipe(tmp_path):
    with pytest.raises(ValueError, match="is neither a file nor a shipped recipe"):
        load_recipe(tmp_path)


def test_oversized_recipe_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"# \n" * (MAX_BYTES // 3 + 1))
    monkeypatch.setattr("quantrot.recipe.parse_recipe", lambda *_: pytest.fail("parsed"))
    with pytest.raises(ValueError, match=rf"big\.yaml: \d+ bytes; a recipe has at most {MAX_BYTES}$"):
        load_recipe(path)


def test_recipe_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\n\nskipp: []\n")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:3: unknown key 'skipp'"):
        load_recipe(path)
