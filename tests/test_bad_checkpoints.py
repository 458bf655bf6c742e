"""Malformed checkpoints and requests: each is a ValueError that says what to mend; the source and outputs stay whole."""
# ruff: noqa: E501 (one case a line)

import errno
import json
import os
import re
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import quantrot
from quantrot.checkpoint import INDEX, SINGLE
from quantrot.cli.common import parse_size
from quantrot.cli.main import app
from quantrot.convert import convert
from quantrot.manifest import MANIFEST, VERSION, read_manifest
from quantrot.plan import plan

ROTATE = {"rotations": {"R1": {"kind": "hadamard"}}}
FP8 = {"linear": [{"match": "*", "weights": {"format": "fp8", "block": "channel"}}]}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GAIN = "model.layers.0.input_layernorm.weight"
SUPPORTED = r"is not supported\. Supported: llama: LlamaForCausalLM .*; mistral: MistralForCausalLM"
NEEDS_COUNT = r"a positive integer is needed$"


@pytest.fixture(scope="module")
def single(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("single") / "model")


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory):
    root = tiny(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="150KB")
    assert len(list(root.glob("model-*.safetensors"))) == 3
    return root


@pytest.fixture(scope="module")
def converted(single, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(single, FP8, out)
    return out


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


# --- Ways to break a checkpoint --------------------------------------------------------------------------------------


def config(drop=(), **changes):
    def edit(root):
        path = root / "config.json"
        data = json.loads(path.read_bytes()) | changes
        path.write_text(json.dumps({k: v for k, v in data.items() if k not in drop}))

    return edit


def config_bytes(data):
    return lambda root: (root / "config.json").write_bytes(data)


def index_bytes(data):
    return lambda root: (root / INDEX).write_bytes(data)


def index(change):
    def edit(root):
        data = json.loads((root / INDEX).read_bytes())
        change(data["weight_map"])
        (root / INDEX).write_text(json.dumps(data))

    return edit


def remove(*names):
    return lambda root: [(root / name).unlink() for name in names]


def split(raw):
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def join(header, data):
    return len(header).to_bytes(8, "little") + header + data


def weights_bytes(change):
    """Change the bytes of model.safetensors."""

    def edit(root):
        path = root / SINGLE
        path.write_bytes(change(path.read_bytes()))

    return edit


def raw_header(change):
    """Change the header's JSON text."""
    return weights_bytes(lambda raw: join(change(split(raw)[0]), split(raw)[1]))


def header(change):
    """Change the header's JSON tree."""

    def edit(text):
        tree = json.loads(text)
        change(tree)
        return json.dumps(tree).encode()

    return raw_header(edit)


def entry(name=Q_PROJ, **changes):
    """Change one tensor's entry in the header."""
    return header(lambda tree: tree[name].update(changes))


def moved(first, last):
    """Move the ends of a tensor's bytes."""

    def change(tree):
        start, stop = tree[Q_PROJ]["data_offsets"]
        tree[Q_PROJ]["data_offsets"] = [start + first, stop + last]

    return header(change)


def tensors(change):
    """Change the tensors and write a healthy file."""

    def edit(root):
        found = load_file(root / SINGLE)
        change(found)
        save_file(found, root / SINGLE, metadata={"format": "pt"})

    return edit


def poison(name, value, at=(-1, -1)):
    def change(found):
        found[name][at] = value

    return tensors(change)


def only_pickles(root):
    (root / SINGLE).unlink()
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")


def both(*edits):
    return lambda root: [edit(root) for edit in edits]


def nothing(root):
    pass


# name, what is done to the single-file checkpoint, what the first line of the message must hold
BROKEN = [
    # config.json
    ("config-missing", remove("config.json"), r"config\.json: missing; a Hugging Face checkpoint directory has a config\.json$"),
    ("config-empty", config_bytes(b""), r"config\.json: not valid JSON: Expecting value"),
    ("config-cut-off", config_bytes(b'{"model_type": "lla'), r"config\.json: not valid JSON: Unterminated string"),
    ("config-not-utf8", config_bytes(b'{"model_type": "\xff"}'), r"config\.json: not valid JSON: .*can't decode"),
    ("config-nested-deeply", config_bytes(b"[" * 100_000), r"config\.json: not valid JSON: .*recursion"),
    ("config-a-list", config_bytes(b"[1]"), r"config\.json: a JSON object is needed, found a list$"),
    ("config-number-of-5000-digits", config_bytes(b'{"hidden_size": %s}' % (b"9" * 5000)), r"config\.json: not valid JSON: Exceeds the limit"),
    ("model-type", config(model_type="qwen2"), rf"config\.json: model_type 'qwen2' {SUPPORTED}"),
    ("model-type-missing", config(drop=["model_type"]), rf"config\.json: model_type None {SUPPORTED}"),
    ("model-type-a-list", config(model_type=["llama"]), rf"config\.json: model_type \['llama'\] {SUPPORTED}"),
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
    # which files
    ("no-weights", remove(SINGLE), r"model: no model\.safetensors and no model\.safetensors\.index\.json$"),
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
    ("tensors-missing", tensors(lambda found: found.pop(Q_PROJ)), rf"model: 1 tensors are missing: {Q_PROJ}$"),
    ("many-tensors-missing", config(num_hidden_layers=4), r"model: 18 tensors are missing: model\.layers\.2\.\S+, \S+, \S+, \.\.\.$"),
    ("biases-missing", config(attention_bias=True), r"model: 8 tensors are missing: model\.layers\.0\.self_attn\.q_proj\.bias, "),
    ("tensor-unknown", tensors(lambda found: found.update({"model.extra.weight": torch.ones(2)})), r"model\.safetensors: tensor 'model\.extra\.weight' is not part of a llama model$"),
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
    ("device-unknown", ROTATE, {"device": "tpu"}, r"device is 'tpu'; allowed: cpu, cuda$"),
    ("device-with-a-number", ROTATE, {"device": "cpu:7"}, r"device is 'cpu:7'; allowed: cpu, cuda$"),
    ("shard-size-zero", ROTATE, {"max_shard_size": 0}, r"max_shard_size is 0; a positive number of bytes is needed$"),
    ("attention-and-cache-apart", {"attention": "fp8", "kv_cache": "int4"}, {}, r"recipe: kv_cache: int4 is attended in the model's dtype and attention: fp8 reads e4m3; use kv_cache: fp8, or attention: bf16$"),
    ("pattern-matches-nothing", linear(match="down_porj"), {}, r"recipe: 'down_porj' matches no module of this model \(did you mean 'down_proj'\?\)$"),
    ("pattern-not-close-to-any", linear(match="zzz"), {}, r"recipe: 'zzz' matches no module of this model \(there are down_proj, gate_proj, .*v_proj\)$"),
    ("pattern-is-no-linear", linear(match="embed_tokens"), {}, r"recipe: 'embed_tokens' matches no module of this model \(there are down_proj, .*\)$"),
    ("skip-matches-nothing", {"skip": ["lm_haed"]}, {}, r"recipe: 'lm_haed' matches no module of this model \(did you mean 'lm_head'\?\)$"),
    ("block-does-not-divide", {"rotations": {"R1": {"kind": "hadamard", "block": 24}}}, {}, r"recipe: R1\.block is 24, which does not divide the width 64; use a divisor, or full$"),
    ("bound-that-nothing-meets", {"rotations": {"R1": {"kind": "hadamard", "block": "<=1"}}}, {}, r"recipe: R1\.block is <=1, and no Hadamard block up to 1 divides the width 64$"),
    ("r4-and-hadamard", linear(match="down_proj", hadamard=32) | {"rotations": {"R4": {"kind": "hadamard"}}}, {}, r"recipe: hadamard 32 and R4 both turn model\.layers\.0\.mlp\.down_proj's input; drop one$"),
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
        "1 tensors are missing",
        "'extra' is not part",
        "yaml:7: kv_cache",
        "yaml:2: R1",
        "yaml:3: R2",
        "yaml:5: 'qproj'",
        "yaml:6: 'zzz'",
    ]
    assert [[word for word in wanted if word in line] for line in lines] == [[word] for word in wanted]


# --- What only shows while converting --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [FP8, ROTATE, {"skip": []}], ids=["fp8", "rotated", "copied"])
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        (Q_PROJ, (-1, -1), float("nan")),
        (Q_PROJ, (0, 0), float("inf")),
        ("lm_head.weight", (100, 3), float("-inf")),
        ("model.embed_tokens.weight", (0, 0), float("nan")),
        (GAIN, (5,), float("nan")),
    ],
)
def test_weight_that_is_not_finite_stops_the_conversion(single, tmp_path, recipe, name, at, value):
    root = copy(single, tmp_path)
    poison(name, value, at)(root)
    before = contents(root)
    out = tmp_path / "out"
    with pytest.raises(ValueError) as caught:
        convert(root, recipe, out)
    assert re.fullmatch(
        rf"model\.safetensors: {re.escape(name)} holds NaN or infinity; repair the checkpoint.*", str(caught.value)
    )
    assert contents(root) == before
    assert not out.exists() and not (tmp_path / "out.partial" / MANIFEST).exists()


def test_conversion_that_failed_resumes_after_the_repair(single, tmp_path, monkeypatch):
    """A write that fails half way leaves no output; with room on the disk, --resume ends with the same bytes."""
    convert(single, FP8, tmp_path / "whole", threads=1)
    out, real, written = tmp_path / "out", os.pwrite, []

    def full(descriptor, data, offset):
        if len(written) == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        return real(descriptor, data, offset)

    before = contents(single)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"):
            convert(single, FP8, out, threads=1)
    assert len(written) == 7
    assert contents(single) == before
    assert not out.exists() and not (tmp_path / "out.partial" / MANIFEST).exists()
    with pytest.raises(
        ValueError,
        match=r"out\.partial is left from an unfinished conversion; --resume goes on, --overwrite starts again$",
    ):
        convert(single, FP8, out)
    with pytest.raises(
        ValueError,
        match=r"out\.partial holds an unfinished conversion of another source, recipe, .*start again with --overwrite alone$",
    ):
        convert(single, ROTATE, out, resume=True)
    assert not out.exists()
    convert(single, FP8, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_short_writes_are_continued(single, tmp_path, monkeypatch):
    convert(single, FP8, tmp_path / "whole", threads=1)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:1000], offset))
    convert(single, FP8, tmp_path / "out", threads=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_no_permission_to_write(single, tmp_path, monkeypatch):
    def refuse(descriptor, data, offset):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        convert(single, FP8, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_under_a_file(single, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, ValueError), match="file"):
        convert(single, FP8, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == ""


def test_disk_that_is_too_small(single, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10_000, 9_000, 1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError,
        match=r"^output .*out: the disk has 0\.00 GB free and the conversion writes 0\.00 GB; free some space",
    ):
        convert(single, FP8, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_that_exists_is_kept(single, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(
        ValueError, match=r"^output .*out exists; choose another, or give --overwrite to replace it when done$"
    ):
        convert(single, FP8, out)
    assert (out / "mine").read_text() == "precious"
    assert not (tmp_path / "out.partial").exists()


def test_output_is_kept_when_its_replacement_fails(single, tmp_path):
    out = tmp_path / "out"
    convert(single, FP8, out)
    before = contents(out)
    root = copy(single, tmp_path)
    poison(Q_PROJ, float("nan"))(root)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        convert(root, FP8, out, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("place", [".", "out", "a/b"])
def test_output_inside_the_source(single, tmp_path, place):
    root = copy(single, tmp_path)
    before = contents(root)
    with pytest.raises(ValueError, match=r"^output .* is inside the source .*; choose another directory$"):
        convert(root, FP8, root / place, overwrite=True)
    assert contents(root) == before


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("model", "out"), [("a/b", "a"), ("a/b/c", "a"), ("a.partial", "a"), ("a.replaced", "a")])
def test_source_that_the_output_would_delete(single, tmp_path, model, out, resumed):
    root = shutil.copytree(single, tmp_path / model)
    with pytest.raises(ValueError, match=r"^the source .* is in .*, which would be replaced; choose another output$"):
        convert(root, FP8, tmp_path / out, overwrite=not resumed, resume=resumed)
    assert contents(root) == contents(single)


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_directories_of_somebody_else_are_not_deleted(single, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("mine")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ValueError, match=rf"{name} was not written by quantrot and would be replaced; move it"):
            convert(single, FP8, tmp_path / "out", **options)
    assert contents(tmp_path) == {(tmp_path / name / "precious").relative_to(tmp_path): b"mine"}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_overwrite_replaces_only_what_quantrot_wrote(single, tmp_path, kind):
    out = tmp_path / "out"
    precious = out if kind == "file" else out / "precious"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(
        ValueError, match=r"^output .*out was not written by quantrot and is not replaced; choose another"
    ):
        convert(single, FP8, out, overwrite=True)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [
        b"garbage\n",
        b"\0\0\n",
        b"\xff\xfe\n",
        b"GOODgarbage\n",
        b"GOOD[1]\n",
        b"GOOD{}\n",
        b'GOOD{"step": 999, "sha256": {}}\n',
    ]
    + [b'GOOD{"step": 0, "sha256": {"x": ""}}\n', b"GOOD" + b"[" * 100_000 + b"\n"],
)
def test_journal_that_is_malformed(single, tmp_path, monkeypatch, text):
    out, journal = tmp_path / "out", tmp_path / "out.partial" / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            convert(single, FP8, out, threads=1)
    journal.write_bytes(text.replace(b"GOOD", journal.read_bytes()))
    with pytest.raises(ValueError, match=r"journal\.jsonl: malformed \(.*\); start again with --overwrite alone$"):
        convert(single, FP8, out, resume=True)
    assert not out.exists()
    convert(single, FP8, out, overwrite=True)
    assert (out / MANIFEST).exists()


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_below_one(single, tmp_path, threads):
    with pytest.raises(ValueError, match=rf"^threads is {threads}; a positive integer is needed$"):
        convert(single, FP8, tmp_path / "out", threads=threads)


def test_output_at_the_root(single):
    with pytest.raises(ValueError, match=r"^output / has no name of its own"):
        convert(single, FP8, "/")


def test_cuda_without_a_gpu(single, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device is 'cuda', and there is no CUDA GPU"):
        convert(single, FP8, tmp_path / "out", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "5XB", "GB", "-1GB", "0", "0GB", "1e3MB", "5 G B", "nan", "inf", "5,5GB", "0x10"])
def test_shard_size_that_is_no_size(text):
    with pytest.raises(
        ValueError, match=rf"^max-shard-size is '{re.escape(text)}'; write a size such as 5GB, 500MB or 1GiB$"
    ):
        parse_size(text)


# --- Converted directories -------------------------------------------------------------------------------------------


def edit_manifest(change):
    def edit(out):
        data = json.loads((out / MANIFEST).read_bytes())
        change(data)
        (out / MANIFEST).write_text(json.dumps(data))

    return edit


def flip_last_byte(out):
    raw = bytearray((out / SINGLE).read_bytes())
    raw[-1] ^= 1
    (out / SINGLE).write_bytes(raw)


ALTERED = [
    ("weights-altered", flip_last_byte, r"model\.safetensors: differs from what quantrot\.json lists \(size or sha256\); convert or download again$"),
    ("weights-cut-off", lambda out: os.truncate(out / SINGLE, 1000), r"model\.safetensors: differs from what quantrot\.json lists"),
    ("weights-missing", remove(SINGLE), r"model\.safetensors: missing, although quantrot\.json lists it; convert again$"),
    ("tokenizer-altered", lambda out: (out / "tokenizer.json").write_text("{}"), r"tokenizer\.json: differs from what quantrot\.json lists"),
    ("config-altered", config(rms_norm_eps=0.1), r"config\.json: differs from what quantrot\.json lists"),
    ("manifest-missing", remove(MANIFEST), r"quantrot\.json: missing"),
    ("manifest-not-json", lambda out: (out / MANIFEST).write_bytes(b"{"), r"quantrot\.json: not valid JSON"),
    ("manifest-a-list", lambda out: (out / MANIFEST).write_bytes(b"[]"), r"quantrot\.json: a JSON object is needed, found a list$"),
    ("manifest-of-the-future", edit_manifest(lambda data: data.update(layout=VERSION + 1)), rf"quantrot\.json: layout is {VERSION + 1}; this version reads {VERSION}: upgrade quantrot$"),
    ("manifest-without-linears", edit_manifest(lambda data: data.pop("linears")), r"quantrot\.json: malformed: .*linears.*; convert again$"),
    ("manifest-without-files", edit_manifest(lambda data: data.pop("files")), r"quantrot\.json: malformed: .*files.*; convert again$"),
    ("manifest-names-another-module", edit_manifest(lambda data: data["linears"].update({"model.norm": data["linears"][Q_PROJ.removesuffix(".weight")]})), r"quantrot\.json: 'model\.norm' is not a linear of this model; convert again$"),
    ("manifest-linears-a-list", edit_manifest(lambda data: data.update(linears=[])), r"quantrot\.json: malformed: .*; convert again$"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [pytest.param(*case[1:], id=case[0]) for case in ALTERED])
def test_altered_output_is_not_loaded(converted, tmp_path, damage, message):
    out = shutil.copytree(converted, tmp_path / "out")
    damage(out)
    with pytest.raises(ValueError, match=message):
        quantrot.load(out, device_map="cpu")


def test_unaltered_output_is_loaded(converted):
    assert quantrot.load(converted, device_map="cpu")(torch.tensor([[1, 2]])).logits.isfinite().all()


@pytest.fixture(scope="module")
def online(single, tmp_path_factory):
    out = tmp_path_factory.mktemp("online") / "out"
    convert(single, {"rotations": {"R3": {"kind": "hadamard"}, "R4": {"kind": "random-hadamard", "seed": 1}}}, out)
    return out


DOWN = "model.layers.0.mlp.down_proj"
EDITED = [
    ("seed", lambda data: data["linears"][DOWN]["online"].update(seed=2), r"the matrix of the online rotation R4 \(random-hadamard, block 128, seed 2\) has checksum \w{12}, the weights were turned with \w{12}; convert again$"),
    ("block", lambda data: data["linears"][DOWN]["online"].update(block=64), r"the matrix of the online rotation R4 \(random-hadamard, block 64, seed 1\) has checksum"),
    ("checksum", lambda data: data["linears"][DOWN]["online"].update(checksum="0" * 64), r"R4 .* the weights were turned with 000000000000; convert again$"),
    ("checksum-of-one-of-two", lambda data: data["rotations"]["R4"].update(checksum="0" * 64), r"R4 .* the weights were turned with 000000000000; convert again$"),
    ("attention-checksum", lambda data: data["attention"].update(checksum="0" * 64), r"R3 .* the weights were turned with 000000000000; convert again$"),
    ("attention-kind", lambda data: data["attention"].update(kind="walsh"), r"quantrot\.json: .*walsh"),
    ("block-zero", lambda data: data["linears"][DOWN]["online"].update(block=0), r"quantrot\.json: .*block"),
    ("block-a-word", lambda data: data["linears"][DOWN]["online"].update(block="full"), r"quantrot\.json: malformed"),
    ("seed-a-list", lambda data: data["linears"][DOWN]["online"].update(seed=[1]), r"quantrot\.json: malformed"),
    ("name-a-list", lambda data: data["linears"][DOWN]["online"].update(name=["R4"]), r"quantrot\.json: malformed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [pytest.param(*case[1:], id=case[0]) for case in EDITED])
def test_manifest_whose_rotation_was_edited_is_refused(online, tmp_path, change, message):
    out = shutil.copytree(online, tmp_path / "out")
    read_manifest(out)
    edit_manifest(change)(out)
    with pytest.raises(ValueError, match=message):
        read_manifest(out)


def test_output_without_a_tensor_is_not_loaded(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    tensors(lambda found: found.pop(Q_PROJ))(out)
    with pytest.raises(
        ValueError, match=r"out: 1 tensors are not in its shards, e\.g\. model\.layers\.0\.self_attn\.q_proj\."
    ):
        quantrot.load(out, device_map="cpu", check_hashes=False)


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
        (["--recipe", "mxfp4", "-o", "out", "--device", "tpu"], "error: device is 'tpu'; allowed: cpu, cuda"),
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
