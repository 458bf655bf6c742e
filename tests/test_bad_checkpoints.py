"""Malformed checkpoints and requests: each is a ValueError that says what to mend; the source stays whole."""
# ruff: noqa: E501 (one case a line)

import errno
import os
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

from quantrot.checkpoint import SINGLE
from quantrot.cli.main import app
from quantrot.convert import convert
from quantrot.plan import plan
from tests.damage import (
    Q_PROJ,
    ROTATE,
    both,
    config,
    config_bytes,
    contents,
    copy,
    entry,
    file,
    header,
    index,
    index_bytes,
    moved,
    only_pickles,
    raw_header,
    remove,
    tensors,
    weights_bytes,
)

SUPPORTED = r"is not supported\. Supported: llama: LlamaForCausalLM .*; mistral: MistralForCausalLM"
NEEDS_COUNT = r"a positive integer is needed$"


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory):
    root = tiny(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="150KB")
    assert len(list(root.glob("model-*.safetensors"))) == 3
    return root


# name, what is done to the single-file checkpoint, what the first line of the message must hold
BROKEN = [
    # config.json
    ("config-missing", remove("config.json"), r"config\.json: missing; a Hugging Face checkpoint directory has a config\.json$"),
    ("config-empty", config_bytes(b""), r"config\.json: not valid JSON: Expecting value"),
    ("config-byte-order-mark", config_bytes(b'\xef\xbb\xbf{"model_type": "llama"}'), r"config\.json: not valid JSON: it begins with a byte order mark"),
    ("config-cut-off", config_bytes(b'{"model_type": "lla'), r"config\.json: not valid JSON: Unterminated string"),
    ("config-not-utf8", config_bytes(b'{"model_type": "\xff"}'), r"config\.json: not valid JSON: .*can't decode"),
    ("config-nested-deeply", config_bytes(b"[" * 100_000), r"config\.json: not valid JSON: .*recursion"),
    ("config-a-list", config_bytes(b"[1]"), r"config\.json: a JSON object is needed, found a list$"),
    ("config-number-of-5000-digits", config_bytes(b'{"hidden_size": %s}' % (b"9" * 5000)), r"config\.json: not valid JSON: Exceeds the limit"),
    ("model-type", config(model_type="gemma"), rf"config\.json: model_type 'gemma' {SUPPORTED}"),
    ("model-type-missing", config(drop=["model_type"]), rf"config\.json: model_type None {SUPPORTED}"),
    ("model-type-a-list", config(model_type=["llama"]), rf"config\.json: model_type \['llama'\] {SUPPORTED}"),
    ("layers-unlike-mistral", config(model_type="mistral", sliding_window=8, layer_types=["full_attention", "sliding_attention"]), r"config\.json: sliding_window is 8 and layer_types are not all 'sliding_attention' \(Ministral\), which is not supported; .* drop layer_types$"),
    ("layers-slide-nowhere", config(model_type="mistral", sliding_window=None, layer_types=["sliding_attention"] * 2), r"config\.json: sliding_window is None and layer_types are not all 'full_attention'"),
    ("generation-config", file("generation_config.json", b"{"), r"generation_config\.json: not valid JSON"),
    ("tokenizer", file("tokenizer.json", b"{"), r"tokenizer\.json: not valid JSON"),
    ("already-quantized", config(quantization_config={"quant_method": "fp8"}), r"config\.json: the checkpoint is already quantized \(quantization_config\); convert its original$"),
    ("heads-do-not-divide", config(num_attention_heads=5, drop=["head_dim"]), r"config\.json: hidden_size 64 is not a multiple of num_attention_heads 5; set head_dim$"),
    ("kv-heads-do-not-divide", config(num_key_value_heads=3), r"config\.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3$"),
    ("size-missing", config(drop=["hidden_size"]), rf"config\.json: hidden_size is None; {NEEDS_COUNT}"),
    ("size-zero", config(intermediate_size=0), rf"config\.json: intermediate_size is 0; {NEEDS_COUNT}"),
    ("size-negative", config(num_hidden_layers=-2), rf"config\.json: num_hidden_layers is -2; {NEEDS_COUNT}"),
    ("size-true", config(num_attention_heads=True), rf"config\.json: num_attention_heads is True; {NEEDS_COUNT}"),
    ("size-a-word", config(vocab_size="256"), rf"config\.json: vocab_size is '256'; {NEEDS_COUNT}"),
    ("size-a-float", config(hidden_size=64.0), rf"config\.json: hidden_size is 64\.0; {NEEDS_COUNT}"),
    ("size-null", config(max_position_embeddings=None), rf"config\.json: max_position_embeddings is None; {NEEDS_COUNT}"),
    ("kv-heads-negative", config(num_key_value_heads=-1), rf"config\.json: num_key_value_heads is -1; {NEEDS_COUNT}"),
    *((f"epsilon-{name}", config(rms_norm_eps=value), rf"config\.json: rms_norm_eps is {shown}; a small positive number is needed, as 1e-05$") for name, value, shown in [
        ("a-word", "x", "'x'"), ("negative", -1.0, r"-1\.0"), ("zero", 0.0, r"0\.0"), ("an-integer", 1, "1"), ("null", None, "None"),
        ("nan", float("nan"), "nan"), ("infinite", float("inf"), "inf"),
    ]),
    *((f"dtype-{name}", config(**{key: value}), rf"config\.json: {key} is {value!r}; allowed: auto, float64, float32, float16, bfloat16; give the weights' own$") for name, key, value in [
        ("unknown", "dtype", "float17"), ("older-key", "torch_dtype", "float17"), ("integer", "dtype", "int64"), ("no-dtype", "dtype", "nn"), ("a-number", "dtype", 3),
    ]),
    *((f"rope-type-{name}", config(**{key: rope}), rf"config\.json: rope_type of {key} is {shown}; allowed: default, linear, dynamic, yarn, longrope, llama3, .*; give the model's own$") for name, key, rope, shown in [
        ("unknown", "rope_parameters", {"rope_type": "nonsense", "rope_theta": 1e4}, "'nonsense'"), ("older-key", "rope_scaling", {"type": "su", "factor": 2.0}, "'su'"),
        ("null", "rope_parameters", {"rope_type": None}, "None"), ("a-list", "rope_parameters", {"rope_type": ["yarn"]}, r"\['yarn'\]"),
    ]),
    ("rope-without-its-numbers", config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}), r"config\.json: rope_parameters: Missing required keys .*low_freq_factor.*; give the model's own$"),
    ("rope-a-word", config(rope_parameters="yarn"), r"config\.json: rope_parameters is 'yarn'; an object or null is needed$"),
    # which files
    ("no-weights", remove(SINGLE), r"model: no model\.safetensors and no model\.safetensors\.index\.json; give a checkpoint that was saved as safetensors$"),
    ("a-peft-adapter", both(remove("config.json", SINGLE), file("adapter_config.json", b"{}")), r"model: a PEFT adapter \(adapter_config\.json\); merge it into its model first"),
    ("only-gguf", both(remove("config.json", SINGLE), file("m.gguf", b"")), r"model: holds GGUF weights \(m\.gguf\), which are not read; give the safetensors checkpoint$"),
    ("gguf-and-a-config", both(remove(SINGLE), file("m.gguf", b"")), r"model: holds GGUF weights \(m\.gguf\), which are not read"),
    ("only-pickles", only_pickles, r"model: holds only pickle weights \(pytorch_model\.bin\), which can run code and are never loaded; save the model as safetensors first"),
    ("index-not-json", index_bytes(b"{"), r"model\.safetensors\.index\.json: not valid JSON"),
    ("index-a-list", index_bytes(b"[]"), r"model\.safetensors\.index\.json: a JSON object is needed, found a list$"),
    ("index-without-map", index_bytes(b"{}"), r"index\.json: weight_map is missing or does not map tensor names to file names$"),
    ("index-map-to-numbers", index_bytes(b'{"weight_map": {"a": 1}}'), r"index\.json: weight_map is missing or does not map"),
    ("index-map-empty", index_bytes(b'{"weight_map": {}}'), r"model: 21 tensors are missing: model\.embed_tokens\.weight, "),
    ("index-outside", index_bytes(b'{"weight_map": {"a": "../model.safetensors"}}'), r"index\.json: '\.\./model\.safetensors' points outside the directory; only plain file names are read$"),
    ("index-absolute", index_bytes(b'{"weight_map": {"a": "/etc/passwd"}}'), r"index\.json: '/etc/passwd' points outside the directory"),
    ("index-dots", index_bytes(b'{"weight_map": {"a": ".."}}'), r"index\.json: '\.\.' points outside the directory"),
    ("index-empty-name", index_bytes(b'{"weight_map": {"a": ""}}'), r"index\.json: '' points outside the directory"),
    ("index-null-byte", index_bytes(b'{"weight_map": {"a": "a\\u0000b"}}'), r"(points outside the directory|missing 1 of 1 shards)"),
    ("index-names-a-pickle", both(only_pickles, index_bytes(b'{"weight_map": {"a": "pytorch_model.bin"}}')), r"pytorch_model\.bin: not a safetensors file"),
    # the bytes of a safetensors file
    ("file-empty", weights_bytes(lambda raw: b""), r"model\.safetensors: not a safetensors file, or truncated: header of 0 bytes in a file of 0$"),
    ("file-a-git-lfs-pointer", weights_bytes(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), r"model\.safetensors: a Git LFS pointer, not the file itself; run git lfs pull, or download it again$"),
    ("weights-a-link-to-nothing", lambda root: [(root / "model.safetensors").unlink(), (root / "model.safetensors").symlink_to("/nowhere/blob")], r"model/model\.safetensors: links to /nowhere/blob, which is not there; download it again$"),
    ("tokenizer-a-link-to-nothing", lambda root: [(root / "tokenizer.json").unlink(), (root / "tokenizer.json").symlink_to("/nowhere/blob")], r"model/tokenizer\.json: links to /nowhere/blob, which is not there; download it again$"),
    ("file-of-seven-bytes", weights_bytes(lambda raw: raw[:7]), r"model\.safetensors: not a safetensors file, or truncated"),
    ("file-cut-in-the-header", weights_bytes(lambda raw: raw[:100]), r"not a safetensors file, or truncated: header of \d+ bytes in a file of 100$"),
    ("file-cut-in-the-data", weights_bytes(lambda raw: raw[:-1]), r"truncated or padded: the header describes \d+ bytes, the file has \d+$"),
    ("file-padded", weights_bytes(lambda raw: raw + b"\0"), r"truncated or padded: the header describes \d+ bytes, the file has \d+$"),
    ("header-length-huge", weights_bytes(lambda raw: b"\xff" * 8 + raw[8:]), r"truncated: header of 18446744073709551615 bytes in a file of \d+$"),
    ("header-length-beyond-the-file", weights_bytes(lambda raw: len(raw).to_bytes(8, "little") + raw[8:]), r"truncated: header of \d+ bytes in a file of \d+$"),
    ("header-length-zero", weights_bytes(lambda raw: bytes(8) + raw[8:]), r"truncated: header of 0 bytes"),
    ("header-not-json", raw_header(lambda text: b"x" + text[1:]), r"model\.safetensors: the safetensors header is not valid JSON: Expecting value"),
    ("header-not-utf8", raw_header(lambda text: b'{"\xff' + text[1:]), r"the safetensors header is not valid JSON: .*can't decode"),
    ("header-a-list", raw_header(lambda text: b"[]"), r"the safetensors header is not a JSON object$"),
    ("header-nested-deeply", raw_header(lambda text: b"[" * 100_000), r"the safetensors header is not valid JSON"),
    ("header-number-of-5000-digits", raw_header(lambda text: b'{"a": %s}' % (b"9" * 5000)), r"the safetensors header is not valid JSON"),
    ("entry-a-number", header(lambda tree: tree.update({Q_PROJ: 3})), rf"tensor '{Q_PROJ}' lacks dtype, shape or data_offsets$"),
    ("entry-without-dtype", header(lambda tree: tree[Q_PROJ].pop("dtype")), rf"tensor '{Q_PROJ}' lacks dtype, shape or data_offsets$"),
    ("offsets-of-three", entry(data_offsets=[0, 1, 2]), r"lacks dtype, shape or data_offsets$"),
    ("offsets-fractional", entry(data_offsets=[0.5, 1]), r"has shape \[64, 64\] and offsets 0\.5, 1$"),
    ("offsets-outside", moved(1 << 40, 1 << 40), r"tensor '.*' starts at byte \d+, the one before ends at \d+$"),
    ("offsets-negative", entry(data_offsets=[-4, 16380]), r"has shape \[64, 64\] and offsets -4, 16380$"),
    ("offsets-overlap", moved(-4, -4), r"tensor '.*' starts at byte \d+, the one before ends at \d+$"),
    ("hole", header(lambda tree: tree.pop(Q_PROJ)), r"tensor '.*' starts at byte \d+, the one before ends at \d+$"),
    ("shape-negative", entry(shape=[-64, -64]), r"has shape \[-64, -64\] and offsets"),
    ("shape-a-number", entry(shape=4096), r"has shape 4096 and offsets"),
    ("shape-of-words", entry(shape=["64", "64"]), r"has shape \['64', '64'\] and offsets"),
    ("shape-needs-more-bytes", entry(shape=[64, 65]), r"F32 \[64, 65\] needs 16640 bytes, its offsets span 16384$"),
    ("dtype-needs-fewer-bytes", entry(dtype="BF16"), r"BF16 \[64, 64\] needs 8192 bytes, its offsets span 16384$"),
    ("dtype-unknown", entry(dtype="F4"), r"has dtype 'F4'; supported: F64, F32, F16, BF16, "),
    ("dtype-a-list", entry(dtype=["F32"]), r"has dtype \['F32'\]; supported: F64, "),
    # tensors that are not the model's
    ("shape-not-as-config-says", config(hidden_size=128, head_dim=16), r"model\.safetensors: \S+ has shape \(.*\); config\.json implies \(.*\)$"),
    ("tensors-missing", tensors(lambda found: found.pop(Q_PROJ)), rf"model: 1 tensor is missing: {Q_PROJ}$"),
    ("head-missing", tensors(lambda found: found.pop("lm_head.weight")), r"model: 1 tensor is missing: lm_head\.weight; set tie_word_embeddings to true in config\.json if the embedding is meant$"),
    ("tensors-of-a-wrapper", tensors(lambda found: [found.update({f"module.{name}": found.pop(name)}) for name in list(found)]), r"model: 21 tensors are missing: \S+, \S+, \S+, \.\.\.; they are there with 'module\.' before each, a wrapper's: save the model inside it, .*$"),
    ("many-tensors-missing", config(num_hidden_layers=4), r"model: 18 tensors are missing: model\.layers\.2\.\S+, \S+, \S+, \.\.\.$"),
    ("biases-missing", config(attention_bias=True), r"model: 8 tensors are missing: model\.layers\.0\.self_attn\.q_proj\.bias, "),
    ("tensor-unknown", tensors(lambda found: found.update({"model.extra.weight": torch.ones(2)})), r"model\.safetensors: 1 tensor is not part of a llama model: model\.extra\.weight$"),
    ("tensors-of-gptq", tensors(lambda found: found.update({f"{Q_PROJ.removesuffix('weight')}{name}": torch.ones(2) for name in ("qweight", "qzeros", "scales", "g_idx")})), r"model\.safetensors: 4 tensors are not part of a llama model: \S+, \S+, \S+, \.\.\.; the model is quantized already: convert the one that it was made from$"),
    ("weight-of-integers", tensors(lambda found: found.update({Q_PROJ: torch.ones(64, 64, dtype=torch.int32)})), rf"model\.safetensors: {Q_PROJ} has dtype I32; allowed: F64, F32, F16, BF16$"),
]  # fmt: skip

# the same for a checkpoint of several files
BROKEN_SHARDS = [
    ("shard-missing", remove("model-00002-of-00003.safetensors"), r"model: missing 1 of 3 shards: model-00002-of-00003\.safetensors; download again$"),
    ("shard-named-that-is-not-there", index(lambda names: names.update({Q_PROJ: "other.safetensors"})), r"model: missing 1 of 4 shards: other\.safetensors; download again$"),
    ("tensor-in-two-shards", lambda root: shutil.copy(root / "model-00001-of-00003.safetensors", root / "model-00002-of-00003.safetensors"), r"model-00002-of-00003\.safetensors: tensor '.*' is also in model-00001-of-00003\.safetensors$"),
    ("shard-cut-off", lambda root: os.truncate(root / "model-00003-of-00003.safetensors", 50), r"model-00003-of-00003\.safetensors: not a safetensors file, or truncated"),
    ("shard-a-directory", both(remove("model-00003-of-00003.safetensors"), lambda root: (root / "model-00003-of-00003.safetensors").mkdir()), r"model-00003-of-00003\.safetensors"),
]  # fmt: skip


def linear(**fields):
    return {"linear": [{"match": "*", "weights": {"format": "mxfp4"}} | fields]}


# name, recipe, other arguments, message: for a healthy checkpoint
REQUESTS = [
    ("recipe-unknown", "mxfp5", {}, r"recipe 'mxfp5' is neither a file nor a shipped recipe \(did you mean 'mxfp4'\?\)"),
    ("device-unknown", ROTATE, {"device": "tpu"}, r"device is 'tpu'; allowed: cpu, cuda, cuda:N$"),
    ("device-with-a-number", ROTATE, {"device": "cpu:7"}, r"device is 'cpu:7'; allowed: cpu, cuda, cuda:N$"),
    ("shard-size-zero", ROTATE, {"max_shard_size": 0}, r"max_shard_size is 0; allowed: a positive number of bytes, as 5_000_000_000$"),
    ("shard-size-in-words", ROTATE, {"max_shard_size": "5GB"}, "max_shard_size is '5GB'; allowed: a positive number of b"),
    ("attention-and-cache-apart", {"attention": "fp8", "kv_cache": "int4"}, {}, r"recipe: kv_cache: int4 is attended in the model's dtype and attention: fp8 reads e4m3; use kv_cache: fp8, or attention: bf16$"),
    ("pattern-matches-nothing", linear(match="down_porj"), {}, r"recipe: 'down_porj' matches no module of this model \(did you mean 'down_proj'\?\)$"),
    ("pattern-not-close-to-any", linear(match="zzz"), {}, r"recipe: 'zzz' matches no module of this model \(there are down_proj, gate_proj, .*v_proj\)$"),
    ("pattern-without-the-model", linear(match="layers.0.*"), {}, r"recipe: 'layers.0.\*' .*\(did you mean 'model.layers.0.\*'\?\)$"),
    ("pattern-is-no-linear", linear(match="embed_tokens"), {}, r"recipe: 'embed_tokens' matches no module of this model \(there are down_proj, .*\)$"),
    ("skip-matches-nothing", {"skip": ["lm_haed"]}, {}, r"recipe: 'lm_haed' matches no module of this model \(did you mean 'lm_head'\?\)$"),
    ("block-does-not-divide", {"rotations": {"R1": {"kind": "hadamard", "block": 24}}}, {}, r"recipe: R1\.block is 24, which does not divide the width 64; use a divisor, or full$"),
    ("bound-that-nothing-meets", {"rotations": {"R1": {"kind": "hadamard", "block": "<=1"}}}, {}, r"recipe: R1\.block is <=1, and no Hadamard block up to 1 divides the width 64$"),
    ("r4-and-hadamard", linear(match="down_proj", hadamard=32) | {"rotations": {"R4": {"kind": "hadamard"}}}, {}, r"recipe: hadamard 32 and R4 both turn the input of down_proj; drop one$"),
]  # fmt: skip


def check_refused(root, tmp_path, message, recipe=ROTATE, **arguments):
    """plan and convert both refuse, with the same message; nothing is written, the source is as it was."""
    before = contents(root)
    out = tmp_path / "out"
    with pytest.raises(ValueError) as planned:
        plan(root, recipe, **arguments)
    with pytest.raises(ValueError) as caught:
        convert(root, recipe, out, **arguments)
    assert str(caught.value) == str(planned.value)
    assert re.search(message, str(caught.value).splitlines()[0]), str(caught.value)
    assert contents(root) == before
    assert [p.name for p in tmp_path.iterdir() if p != root] == []


@pytest.mark.parametrize(("damage", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
def test_malformed_checkpoint(single, tmp_path, damage, message):
    root = copy(single, tmp_path)
    damage(root)
    check_refused(root, tmp_path, message)


@pytest.mark.parametrize(("damage", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN_SHARDS])
def test_malformed_shards(sharded, tmp_path, damage, message):
    root = copy(sharded, tmp_path)
    damage(root)
    check_refused(root, tmp_path, message)


@pytest.mark.parametrize(("recipe", "arguments", "message"), [pytest.param(*case[1:], id=case[0]) for case in REQUESTS])
def test_request_that_cannot_be_met(single, tmp_path, recipe, arguments, message):
    root = copy(single, tmp_path)
    check_refused(root, tmp_path, message, recipe, **arguments)


def test_order_without_a_hadamard_matrix_offers_the_largest_block(tiny, tmp_path):
    root = tiny(tmp_path / "model", hidden=4 * 23 * 2, heads=4, kv_heads=2, layers=1, intermediate=32)
    check_refused(root, tmp_path, r"recipe: R1: .*184.*(92|8)\b", {"rotations": {"R1": {"kind": "hadamard"}}})


def test_sizes_that_no_model_has_are_refused_at_once(single, tmp_path):
    root = copy(single, tmp_path)
    config(num_hidden_layers=10**9)(root)
    check_refused(root, tmp_path, r"num_hidden_layers is 1000000000")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/directory", r"model 'no/such/directory' is no directory; give one, a hub id such as .*, or demo$"),
        ("nowhere", r"model 'nowhere' is no directory; give one, a hub id such as .*, or demo$"),
        ("a b/c", r"model 'a b/c' is no directory"),
        (torch.nn.Linear(64, 64), r"model is a Linear; save it with save_pretrained and give the directory$"),
    ],
)
def test_model_that_is_neither_directory_nor_hub_id(tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        plan(model, ROTATE)


def test_model_that_is_a_file(single):
    with pytest.raises(ValueError, match=r"is a file; give the directory that holds config\.json and the weights$"):
        plan(single / SINGLE, ROTATE)


def test_hub_that_does_not_answer(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("connection refused\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        ValueError, match=r"^model 'owner/name': no such directory, and the hub did not give it.*: connection refused$"
    ):
        plan("owner/name", ROTATE)


def test_a_cache_that_holds_only_a_part_is_said_so(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"^model 'owner/name': no safetensors of it in the cache, .*; download it$"):
        plan("owner/name", ROTATE)


def test_all_errors_of_a_plan_are_reported_at_once(single, tmp_path):
    root = copy(single, tmp_path)
    both(tensors(lambda found: found.pop(Q_PROJ)), tensors(lambda found: found.update({"extra": torch.ones(1)})))(root)
    path = tmp_path / "r.yaml"
    path.write_text(
        "rotations:\n  R1: {kind: hadamard, block: 24}\n  R2: {kind: hadamard, block: 24}\n"
        "linear:\n  - {match: qproj, weights: {format: mxfp4}}\nskip: [zzz]\nkv_cache: int4\nattention: fp8\n"
    )
    with pytest.raises(ValueError) as caught:
        plan(root, path)
    lines = str(caught.value).splitlines()
    wanted = [
        "1 tensor is missing",
        "is not part of a llama model: extra",
        "yaml:7: kv_cache",
        "yaml:2: R1",
        "yaml:3: R2",
        "yaml:5: 'qproj'",
        "yaml:6: 'zzz'",
    ]
    assert [[word for word in wanted if word in line] for line in lines] == [[word] for word in wanted]


# --- The command line ------------------------------------------------------------------------------------------------


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert "Traceback" not in result.output
    return result


def test_cli_shows_every_error_as_a_line_and_exits_with_2(single, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("skip: [zzz]\nkv_cache: int4\nattention: fp8\n")
    for command in (["plan"], ["convert", "-o", tmp_path / "out"], ["convert", "--dry-run"]):
        result = run(command[0], single, "--recipe", recipe, *command[1:])
        assert result.exit_code == 2, result.output
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 2, result.stderr
        assert "kv_cache: int4 is attended" in lines[0] and "'zzz' matches no module" in lines[1]
        assert result.stdout == ""
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--recipe", "mxfp5", "-o", "out"],
            "error: recipe 'mxfp5' is neither a file nor a shipped recipe (did you mean 'mxfp4'?)",
        ),
        (["--recipe", "mxfp4"], "error: --output is missing; give the directory to write, or --dry-run"),
        (
            ["--recipe", "mxfp4", "-o", "out", "--max-shard-size", "lots"],
            "error: max-shard-size is 'lots'; write a size such as 5GB, 500MB or 1GiB",
        ),
        (["--recipe", "mxfp4", "-o", "out", "--device", "tpu"], "error: device is 'tpu'; allowed: cpu, cuda, cuda:N"),
        (["--recipe", "mxfp4", "-o", "file/out"], "error: "),
    ],
)
def test_cli_convert_refuses(single, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = run("convert", single, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_cli_shows_a_failure_of_the_disk_as_an_error(single, tmp_path, monkeypatch):
    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    result = run("convert", single, "--recipe", "mxfp4", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "error: [Errno 28] No space left on device" in result.stderr
    assert not (tmp_path / "out").exists()


def test_cli_inspect_refuses_what_is_no_output(single):
    result = run("inspect", single)
    assert result.exit_code == 2
    assert re.search(r"error: .*quantrot\.json", result.stderr)
