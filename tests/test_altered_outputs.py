"""Converted directories that were altered: each is refused with what to mend."""
# ruff: noqa: E501 (one case a line)

import json
import os
import shutil
import threading

import pytest
import torch

import quantrot
from quantrot.checkpoint import INDEX, SINGLE, first_differing
from quantrot.convert import convert
from quantrot.manifest import MANIFEST, VERSION, read_manifest
from tests.damage import FP8, Q_PROJ, config, remove, tensors


@pytest.fixture(scope="module")
def converted(single, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(single, FP8, out)
    return out


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
    ("manifest-without-recipe", edit_manifest(lambda data: data.pop("recipe")), r"quantrot\.json: malformed: KeyError at 'recipe'; convert again$"),
    ("manifest-without-revision", edit_manifest(lambda data: data["source"].pop("revision")), r"quantrot\.json: malformed: KeyError at 'revision'; convert again$"),
    ("manifest-without-tensors", edit_manifest(lambda data: data["source"].pop("tensors")), r"quantrot\.json: malformed: KeyError at 'tensors'; convert again$"),
    ("manifest-tensors-a-list", edit_manifest(lambda data: data["source"].update(tensors=[Q_PROJ])), r"quantrot\.json: malformed: AttributeError at .*items.*; convert again$"),
    ("manifest-without-shape", edit_manifest(lambda data: data["linears"][Q_PROJ.removesuffix(".weight")].pop("shape")), r"quantrot\.json: malformed: KeyError at 'shape'; convert again$"),
    ("manifest-without-files", edit_manifest(lambda data: data.pop("files")), r"quantrot\.json: malformed: .*files.*; convert again$"),
    ("manifest-without-a-file-of-weights", edit_manifest(lambda data: data.update(files={})), r"quantrot\.json: malformed: KeyError at 'model\.safetensors'; convert again$"),
    ("index-beside-the-weights", lambda out: (out / INDEX).write_text("{}"), r"index\.json: quantrot\.json does not list it, and loaders take it for the weights; move it$"),
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
    ("R3-lost", lambda data: data.update(attention=None), r"quantrot\.json: attention is without R3, which the weights were made for; convert again$"),
    ("R4-lost", lambda data: data["linears"][DOWN].update(online=None), rf"quantrot\.json: {DOWN} is without R4, which"),
    ("cache-lost", lambda data: data["recipe"].update(kv_cache="int4"), r"quantrot\.json: kv_cache is bf16, not int4, which"),
    ("arithmetic-lost", lambda data: data["recipe"].update(attention="fp8"), r"quantrot\.json: attention is bf16, not fp8, which"),
    ("name-a-list", lambda data: data["linears"][DOWN]["online"].update(name=["R4"]), r"quantrot\.json: malformed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [pytest.param(*case[1:], id=case[0]) for case in EDITED])
def test_manifest_whose_rotation_was_edited_is_refused(online, tmp_path, change, message):
    out = shutil.copytree(online, tmp_path / "out")
    read_manifest(out)
    edit_manifest(change)(out)
    with pytest.raises(ValueError, match=message):
        read_manifest(out)


def test_an_online_hadamard_that_was_lost_is_named(single, tmp_path):
    rule = {"match": "*", "weights": {"format": "mxfp4"}, "hadamard": 32}
    convert(single, {"linear": [rule]}, tmp_path / "out")
    edit_manifest(lambda data: data["linears"][DOWN].update(online=None))(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"quantrot\.json: {DOWN} is without its Hadamard of 32, which"):
        quantrot.load(tmp_path / "out")


def test_tensors_that_the_manifest_does_not_describe_are_named(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    tensors(lambda found: found.update({"model.norm.other": torch.ones(4)}))(out)
    with pytest.raises(ValueError, match=r"model\.safetensors: its tensors are not those of quantrot\.json: .*other"):
        quantrot.load(out, device_map="cpu", check_hashes=False)


def test_a_file_that_is_cut_off_is_named_without_its_hash(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    os.truncate(out / SINGLE, (out / SINGLE).stat().st_size - 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: its tensors are not those of quantrot\.json"):
        quantrot.load(out, device_map="cpu", check_hashes=False)


def test_no_pickle_beside_the_weights_is_read(converted, tmp_path):
    out, ids = shutil.copytree(converted, tmp_path / "out"), torch.tensor([[1, 2]])
    (out / "pytorch_model.bin").write_bytes(b"no pickle")
    got, expected = (quantrot.load(path, device_map="cpu")(ids).logits for path in (out, converted))
    assert torch.equal(got, expected)


def test_output_without_a_tensor_is_not_loaded(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    tensors(lambda found: found.pop(Q_PROJ))(out)
    with pytest.raises(
        ValueError, match=r"out: its shards lack 1 tensor, e\.g\. model\.layers\.0\.self_attn\.q_proj\."
    ):
        quantrot.load(out, device_map="cpu", check_hashes=False)


def test_files_are_hashed_at_once_and_the_first_that_differs_is_found(monkeypatch):
    monkeypatch.setattr("quantrot.checkpoint.cpus", lambda: 2)
    both, seen = threading.Barrier(2, timeout=60), []

    def sha256(name):
        both.wait()  # alone it fails
        return name.lower()

    assert first_differing(sha256, {"A": "a", "B": "b"}, seen.append) is None and seen == [0, 1, 2]
    assert first_differing(str.lower, {"A": "a", "B": "x", "C": "x", "D": "d"}, seen.append) == "B"
    assert seen == [0, 1, 2, 0, 1]
