"""Conversions are complete or absent, resumable at every moment, and the same to the byte."""

import hashlib
import json
import os
import shutil
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantrot import convert, load
from quantrot.checkpoint import open_checkpoint, read_rows
from quantrot.formats import dequantize
from quantrot.manifest import read_manifest
from quantrot.plan import plan
from quantrot.rotation import turn_input, turn_output
from quantrot.source import Source

RECIPE = "quarot-mxfp4-online"


def tree(path):
    """name -> sha256 of every file below a directory."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(
        tmp_path_factory.mktemp("model") / "source",
        hidden=128,
        intermediate=384,
        layers=3,
        tied=True,
        attention_bias=True,
        mlp_bias=True,
        dtype=torch.bfloat16,
        max_shard_size="300KB",
    )


def test_threads_and_chunks_do_not_change_a_byte(source, tmp_path, monkeypatch):
    convert(source, RECIPE, tmp_path / "one", threads=1)
    monkeypatch.setattr(sys.modules["quantrot.convert"], "cpus", lambda: 16)  # hashes in threads of their own
    convert(source, RECIPE, tmp_path / "two", threads=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    monkeypatch.setitem(sys.modules["quantrot.plan"].CHUNK, "cpu", 1 << 10)
    convert(source, RECIPE, tmp_path / "small", threads=2)
    assert (
        load_file(tmp_path / "one/model.safetensors").keys() == load_file(tmp_path / "small/model.safetensors").keys()
    )
    for name, tensor in load_file(tmp_path / "one/model.safetensors").items():
        other = load_file(tmp_path / "small/model.safetensors")[name]
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def test_sharded_output_holds_the_same_tensors(source, tmp_path):
    convert(source, RECIPE, tmp_path / "whole")
    convert(source, RECIPE, tmp_path / "parts", max_shard_size=40_000)
    shards = sorted((tmp_path / "parts").glob("*.safetensors"))
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    assert len(shards) > 5 and {p.name for p in shards} == set(index["weight_map"].values())
    merged = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert merged.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[k].view(torch.uint8), whole[k].view(torch.uint8)) for k in whole)
    assert sum(t.nbytes for t in whole.values()) == index["metadata"]["total_size"]
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        a, b = (load(tmp_path / d, device_map="cpu")(ids).logits for d in ("whole", "parts"))
    assert torch.equal(a, b)


def test_what_a_tokenizer_is_made_of_is_copied(source, tmp_path):
    root = shutil.copytree(source, tmp_path / "source")
    files = {
        "tekken.json": b"{}",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "USE_POLICY.md": b"Be kind.",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    out = convert(root, "int8-weight-only", tmp_path / "out").out
    assert {name: (out / name).read_bytes() for name in files} == files
    assert files.keys() <= read_manifest(out).data["files"].keys()


def test_a_card_keeps_the_licence_and_names_every_online_hadamard(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=128)
    front = "\ufeff---\nlicense: other\nlicense_name: my---licence\nlicense_link: there\n---\n# It\n"
    (source / "README.md").write_text(front, encoding="utf-8")
    weights = {"format": "mxfp4"}
    rules = [{"match": m, "weights": weights, "hadamard": h} for m, h in (("q_proj", 32), ("k_proj", 64))]
    recipe = {"rotations": {"R4": {"kind": "hadamard", "block": 16}}, "linear": rules}
    card = (convert(source, recipe, tmp_path / "out").out / "README.md").read_text()
    assert yaml.safe_load(card.split("\n---\n")[0])["license_name"] == "my---licence" and "license_link: there" in card
    online = (
        "a Hadamard in front of linears, blocks of 32, online; a Hadamard in front of linears, blocks of 64, online"
    )
    assert f"Rotations: R4 hadamard, blocks of 16, online; {online}.\n" in card


def test_a_card_of_turned_weights_says_that_adapters_do_not_fit(source, tmp_path):
    for recipe, turned in (("rotate-only", True), ("int8-weight-only", False)):
        card = (convert(source, recipe, tmp_path / recipe).out / "README.md").read_text()
        assert ("Adapters made for the original model" in card) is turned


def test_a_card_names_a_base_model_that_the_hub_knows(source, tmp_path, monkeypatch):
    def front(model, out):
        _, text, _ = (convert(model, "int8-weight-only", out).out / "README.md").read_text().split("---\n", 2)
        return yaml.safe_load(text)

    assert "base_model" not in front(source, tmp_path / "local")
    monkeypatch.setattr(sys.modules["quantrot.plan"], "open_source", lambda model: Source(model, "abcdef", source))
    assert front("owner/name", tmp_path / "hub")["base_model"] == "owner/name"


def test_a_linear_is_fold_turn_turn_quantize(source, tmp_path):
    """One v_proj and one down_proj, from the source's tensors by hand."""
    convert(source, RECIPE, tmp_path / "out")
    planned, stored = plan(source, RECIPE), load_file(tmp_path / "out/model.safetensors")
    tensors = planned.checkpoint.tensors
    r1, r2, r4 = (planned.rotations[name] for name in ("R1", "R2", "R4"))
    gain = read_rows(tensors["model.layers.1.input_layernorm.weight"]).float()
    v = read_rows(tensors["model.layers.1.self_attn.v_proj.weight"]).float()
    down = read_rows(tensors["model.layers.1.mlp.down_proj.weight"]).float()
    expected = {
        "model.layers.1.self_attn.v_proj": turn_output(turn_input(v * gain, r1), r2),
        "model.layers.1.mlp.down_proj": turn_output(turn_input(down, r4), r1),
    }
    for fqn, exact in expected.items():
        weights = planned.linears[fqn].weights
        data = [stored[f"{fqn}.weight_packed"], stored[f"{fqn}.weight_scale"]]
        got = dequantize(weights, data, exact.shape[1], torch.float32)
        sqnr = 10 * torch.log10(exact.square().sum() / (got - exact).square().sum())
        assert sqnr > 18, fqn  # MXFP4's own noise; a wrong order of operations gives about 0
        assert abs(sqnr - read_manifest(tmp_path / "out").data["linears"][fqn]["sqnr_db"]) < 0.01
    assert (stored["model.layers.1.input_layernorm.weight"] == 1).all()
    assert "lm_head.weight" in stored


def test_memory_and_sizes_are_planned_exactly(source, tmp_path):
    planned = plan(source, RECIPE, max_shard_size=100_000)
    convert(source, RECIPE, tmp_path / "out", max_shard_size=100_000)
    for shard in planned.shards:
        assert (tmp_path / "out" / shard.name).stat().st_size == shard.nbytes
    written = open_checkpoint(tmp_path / "out")
    assert [(n, t.shape) for n, t in written.tensors.items()] == [
        (t.name, t.shape) for shard in planned.shards for t in shard.tensors
    ]


KILLED = """
import os, signal, sys
import quantrot.convert
from quantrot.convert import convert
source, out, recipe, call, moment = sys.argv[1:6]
seen = 0
real = getattr(os, call)
def counted(*args, **kwargs):
    global seen
    seen += 1
    if seen == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(os, call, counted)
convert(source, recipe, out, resume="--resume" in sys.argv, overwrite="--overwrite" in sys.argv)
"""


@pytest.fixture
def run_killed(alone):
    return lambda source, out, call, moment, *flags: alone(KILLED, source, out, RECIPE, call, moment, *flags)


@pytest.mark.parametrize("call, moment", [("pwrite", 1), ("pwrite", 40), ("fsync", 1), ("fsync", 2), ("rename", 1)])
def test_killed_and_resumed_is_the_same_to_the_byte(source, tmp_path, call, moment, run_killed):
    convert(source, RECIPE, tmp_path / "unbroken")
    died = run_killed(source, tmp_path / "out", call, moment)
    assert died.returncode == -9, died.stderr
    assert not (tmp_path / "out").exists()
    convert(source, RECIPE, tmp_path / "out", resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "unbroken")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "unbroken"]


def test_resume_does_only_what_is_left_and_mends_what_was_damaged(source, tmp_path, run_killed):
    convert(source, RECIPE, tmp_path / "unbroken")
    assert run_killed(source, tmp_path / "out", "pwrite", 60).returncode == -9
    partial = tmp_path / "out.partial"
    lines = (partial / "journal.jsonl").read_bytes().splitlines()
    finished = {json.loads(line)["step"] for line in lines[1:]}
    assert 5 < len(finished) < len(plan(source, RECIPE).steps)
    with (partial / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"step": 9999, "sha2')  # a torn line
    with next(partial.glob("*.safetensors")).open("r+b") as shard:  # damage the first finished tensor
        shard.seek(-1000, os.SEEK_END)
        shard.write(b"\xff" * 10)
    seen = []
    convert(source, RECIPE, tmp_path / "out", resume=True, progress=lambda name, done, total: seen.append(done))
    assert seen[0] > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "unbroken")


def test_overwrite_keeps_the_old_output_until_the_new_one_is_done(source, tmp_path, run_killed):
    convert(source, "int8-weight-only", tmp_path / "out")
    old = tree(tmp_path / "out")
    assert run_killed(source, tmp_path / "out", "pwrite", 30, "--overwrite").returncode == -9
    assert tree(tmp_path / "out") == old
    convert(source, RECIPE, tmp_path / "out", resume=True, overwrite=True)
    convert(source, RECIPE, tmp_path / "fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "out"]


def test_resuming_a_finished_conversion_does_nothing(source, tmp_path):
    convert(source, RECIPE, tmp_path / "out")
    before = (tmp_path / "out/quantrot.json").stat().st_mtime_ns
    convert(source, RECIPE, tmp_path / "out", resume=True)
    assert (tmp_path / "out/quantrot.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("which", ["source", "output"])
def test_a_finished_conversion_is_not_one_of_other_weights_or_bytes(tiny, tmp_path, which):
    source, out = tiny(tmp_path / "model"), tmp_path / "out"
    convert(source, "fp8-dynamic", out)
    with ((source if which == "source" else out) / "model.safetensors").open("r+b") as file:  # same size, same header
        file.seek(-2, os.SEEK_END)
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="exists; choose another, or give overwrite"):
        convert(source, "fp8-dynamic", out, resume=True)
    convert(source, "fp8-dynamic", out, resume=True, overwrite=True)
    convert(source, "fp8-dynamic", tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


@pytest.mark.parametrize("change", ["another", "gone", "new"])
def test_a_finished_conversion_is_not_one_of_other_files_beside_the_weights(tiny, tmp_path, change):
    source, out = tiny(tmp_path / "model"), tmp_path / "out"
    (source / "generation_config.json").write_text("{}")
    convert(source, "fp8-dynamic", out)
    convert(source, "fp8-dynamic", out, resume=True)
    if change == "another":
        (source / "generation_config.json").write_text('{"top_k": 1}')
    elif change == "gone":
        (source / "generation_config.json").unlink()
    else:
        (source / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match="exists; choose another, or give overwrite"):
        convert(source, "fp8-dynamic", out, resume=True)


def test_a_single_file_is_read_though_an_index_was_left_beside_it(tiny, tmp_path):
    source = tiny(tmp_path / "model", max_shard_size="50KB")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data.fill_(0.5)
    model.save_pretrained(source)
    assert (source / "model.safetensors.index.json").exists() and not list(source.glob("model-*"))
    head = open_checkpoint(source).tensors["lm_head.weight"]
    assert (read_rows(head) == 0.5).all()


def test_a_bias_that_overflows_when_it_is_turned_is_an_error(tiny, tmp_path):
    source = tiny(tmp_path / "model", attention_bias=True, dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: torch.full_like(t, 2e4) for name, t in tensors.items() if name.endswith("o_proj.bias")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="o_proj.bias holds values that overflow torch.float16 once folded and turned"):
        convert(source, {"rotations": {"R1": {"kind": "hadamard"}}}, tmp_path / "out")


def test_two_conversions_into_one_place_are_refused(source, tmp_path, run_killed):
    import fcntl

    assert run_killed(source, tmp_path / "out", "pwrite", 5).returncode == -9
    with (tmp_path / "out.partial/journal.jsonl").open("rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        for way in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match="another process is converting into it"):
                convert(source, RECIPE, tmp_path / "out", **way)


def test_a_changed_source_is_noticed_on_resume(tiny, tmp_path, run_killed):
    source = tiny(tmp_path / "model", hidden=128, intermediate=384, layers=3, tied=True)
    assert run_killed(source, tmp_path / "out", "pwrite", 5).returncode == -9
    file = source / "model.safetensors"
    os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match="unfinished conversion of another source"):
        convert(source, RECIPE, tmp_path / "out", resume=True)


def test_manifest_records_source_and_rotations(source, tmp_path):
    convert(source, RECIPE, tmp_path / "out")
    data = read_manifest(tmp_path / "out").data
    assert data["rotations"].keys() == {"R1", "R2", "R4"} and data["rotations"]["R4"]["online"]
    assert data["recipe"]["linear"][0]["weights"]["scale_rule"] == "mse"  # resolved: defaults written out
    embedding = open_checkpoint(source).tensors["model.embed_tokens.weight"]
    digest = hashlib.sha256(read_rows(embedding).view(torch.uint8).numpy().tobytes()).hexdigest()
    assert data["source"]["tensors"]["model.embed_tokens.weight"] == digest
    assert set(data["files"]) == {p.name for p in (tmp_path / "out").iterdir()} - {"quantrot.json", "README.md"}


@pytest.mark.parametrize(
    "dtype, value, recipe",
    [
        (torch.float32, 3e38, "rotate-only"),  # sums of a Hadamard row pass float32's largest number
        (torch.float16, 6e4, "rotate-only"),  # within float16 before the rotation, beyond it after
        (torch.float64, 1e300, "mxfp4"),
    ],
)
def test_weights_that_overflow_on_the_way_are_refused(tiny, tmp_path, dtype, value, recipe):
    source = tiny(tmp_path / "model", dtype=dtype)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][:] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="down_proj.weight holds values that overflow"):
        convert(source, recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_finite_weights_keep_a_readable_manifest(tiny, tmp_path):
    source = tiny(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e25  # its squares are past float32
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, "fp8-dynamic", tmp_path / "out")
    data = read_manifest(tmp_path / "out").data
    assert data["linears"]["model.layers.0.mlp.down_proj"]["sqnr_db"] is None
    assert data["linears"]["model.layers.1.mlp.down_proj"]["sqnr_db"] > 25


def test_a_broken_norm_is_named_before_anything_is_written(tiny, tmp_path):
    source = tiny(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.layers.1.input_layernorm.weight holds NaN"):
        convert(source, "quarot-mxfp4", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
