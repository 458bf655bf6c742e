"""A model that is read a layer at a time says what the loaded one says."""

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantrot import convert, load
from quantrot import streamed as module
from quantrot.checkpoint import look_up, open_checkpoint, read_rows
from quantrot.load import architecture, skeleton
from quantrot.manifest import read_manifest
from quantrot.streamed import streamed_logits

WINDOWS = torch.randint(2, 190, (3, 40), generator=torch.Generator().manual_seed(0))
MXFP4 = {"weights": {"format": "mxfp4"}, "activations": {"format": "mxfp4"}}
RECIPES = {
    "rotated": ({}, "rotate-only"),
    "online rotations with signs": (
        {},
        {"rotations": {"R4": {"kind": "random-hadamard", "seed": 1}}, "linear": [{"match": "*", **MXFP4}]},
    ),
    "online rotations alone": ({}, {"rotations": {"R4": {"kind": "hadamard", "block": 32}}}),
    "blocks of tokens": ({}, "gridquant-fp8"),
    "int4 cache": ({}, "quarot-w4a4kv4"),
    "key biases": ({"model_type": "qwen2"}, "fp8-attention-rotated"),
    "norms of heads": ({"model_type": "qwen3"}, "fp8-attention-rotated"),
    "all biases": ({"attention_bias": True, "mlp_bias": True}, "int8-weight-only"),
    "a tied head": ({"tied": True}, "int8-weight-only"),
    "a quantized head": ({"tied": True}, {"skip": [], "linear": [{"match": "*", **MXFP4}]}),
}


def nothing(done, total):
    pass


def streamed(out, progress=nothing):
    model = skeleton(out, read_manifest(out), torch.float32)
    return list(streamed_logits(model, open_checkpoint(out).tensors, WINDOWS, "cpu", progress))


@pytest.mark.parametrize("case", RECIPES)
def test_a_conversion_says_what_it_says_when_loaded(tiny, tmp_path, case):
    made, recipe = RECIPES[case]
    source = tiny(tmp_path / "model", hidden=128, intermediate=256, dtype=torch.bfloat16, **made)
    out = convert(source, recipe, tmp_path / "out").out
    loaded = load(out, device_map="cpu", dtype=torch.float32)
    assert not any(part.training for part in loaded.modules())
    assert not any(part.training for part in skeleton(out, read_manifest(out), torch.float32).modules())
    with torch.no_grad():
        for ids, logits in zip(WINDOWS, streamed(out), strict=True):
            torch.testing.assert_close(logits, loaded(ids[None]).logits[0, :-1], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["hadamard-mxfp4", "fp8-block", "int8-weight-only", "fp8-attention-rotated"])
def test_a_conversion_on_a_gpu_says_what_it_says_when_loaded(tiny, tmp_path, recipe):
    source = tiny(tmp_path / "model", hidden=256, intermediate=512, head_dim=64, dtype=torch.bfloat16)
    out = convert(source, recipe, tmp_path / "out").out
    loaded = load(out, device_map="cuda", dtype=torch.float32, merge=False)
    model = skeleton(out, read_manifest(out), torch.float32)
    found = streamed_logits(model, open_checkpoint(out).tensors, WINDOWS, "cuda", nothing)
    with torch.no_grad():
        for ids, logits in zip(WINDOWS, found, strict=True):
            torch.testing.assert_close(logits, loaded(ids[None].cuda()).logits[0, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", [{}, {"tied": True}, {"model_type": "mistral"}], ids=str)
def test_a_model_of_transformers_says_what_it_says_there(tiny, tmp_path, made, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 96)  # of 256: twice 96 and a rest
    source = tiny(tmp_path / "model", dtype=torch.float16, max_shard_size="100KB", **made)
    whole, counted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), []
    meta = architecture(source, torch.float32)
    found = streamed_logits(
        meta, open_checkpoint(source).tensors, WINDOWS, "cpu", lambda *counts: counted.append(counts)
    )
    with torch.no_grad():
        for ids, logits in zip(WINDOWS, found, strict=True):
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, whole(ids[None]).logits[0, :-1], rtol=1e-5, atol=1e-5)
    assert counted == [(1, 2), (2, 2)]


def test_one_layer_at_a_time_is_in_memory(tiny, tmp_path):
    source = tiny(tmp_path / "model", layers=4)
    model, alive = architecture(source, torch.float32), []
    layers = [weakref.ref(layer) for layer in model.model.layers]

    def look(done, total):
        gc.collect()
        alive.append([ref() is not None and next(ref().parameters()).device.type == "cpu" for ref in layers])

    next(streamed_logits(model, open_checkpoint(source).tensors, WINDOWS, "cpu", look))
    assert alive == [[i == layer for i in range(4)] for layer in range(4)]
    gc.collect()
    assert all(ref() is None for ref in layers)
    assert {p.device.type for p in model.lm_head.parameters()} == {"meta"}  # its rows are read as they are needed


def test_rows_are_looked_up_by_their_numbers(tiny, tmp_path):
    source = tiny(tmp_path / "model", dtype=torch.bfloat16)
    info = open_checkpoint(source).tensors["model.embed_tokens.weight"]
    table = AutoModelForCausalLM.from_pretrained(source).model.embed_tokens.weight
    assert torch.equal(look_up(info, WINDOWS), table[WINDOWS])


def test_a_device_that_keeps_the_head_reads_it_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 96)  # of 256: twice 96 and a rest
    source = tiny(tmp_path / "model", dtype=torch.float16)
    info, read, x = open_checkpoint(source).tensors["lm_head.weight"], [], torch.randn(2, 7, 64)
    monkeypatch.setattr(module, "read_rows", lambda *place: read.append(place) or read_rows(*place))
    made = {}
    for device in ("cpu", "cpu:0"):  # the second as a GPU is: not the CPU whose memory the file is in
        multiply = module._by_rows(info, device)
        made[device] = [multiply(part) for part in x]
        assert len(read) == (6 if device == "cpu" else 3)
        read.clear()
    assert all(torch.equal(a, b) for a, b in zip(*made.values(), strict=True))
