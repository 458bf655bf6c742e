"""A model's decoded tokens into a static FP8 cache by rope_hadamard_append: the same codes, nothing copied."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from quantrot.kernels.attention import append
from quantrot.modules import KVCache, QuantizedAttention
from quantrot.modules.masks import leave_masks_out
from quantrot.rotation import Rotation

gpu = pytest.mark.gpu
ROOM = 40
HADAMARD = Rotation("R3", "hadamard", 64, 64, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request):
    return request.param


@pytest.fixture
def used(monkeypatch):
    """The operator is used without a GPU too: its plain torch."""
    monkeypatch.setattr(append, "runs_on", lambda device: True)


@pytest.fixture
def counted(used, monkeypatch):
    """A list that grows with each call of the operator."""
    calls, real = [], append.rope_hadamard_append

    def called(*args, **kwargs):
        calls.append(kwargs["advance"])
        return real(*args, **kwargs)

    monkeypatch.setattr(append, "rope_hadamard_append", called)
    return calls


def model_of(device, layers=3, kind="llama", **attention):
    """bfloat16, head_dim 64, FP8 attention and cache."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, head_dim=64, attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    for p in model.parameters():
        p.data.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else p.data.uniform_(0.5, 1.5)
    for layer in model.model.layers:
        layer.self_attn = QuantizedAttention(layer.self_attn, **({"arithmetic": "fp8", "kv_cache": "fp8"} | attention))
    return model.to(device)


@torch.no_grad()
def decoded(model, ids, mask=None, forward=None, cache=None):
    """Logits of the last 5 of the ids, one at a time after a prompt, and the cache. mask: of padding, [B, ids]."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM) if cache is None else cache
    prompt, given = ids.shape[1] - 5, {"past_key_values": cache}
    model(ids[:, :prompt], attention_mask=None if mask is None else mask[:, :prompt], **given)
    logits = []
    for i in range(prompt, ids.shape[1]):
        seen = None if mask is None else torch.nn.functional.pad(mask[:, : i + 1], (0, ROOM - i - 1))
        logits.append((forward or model)(ids[:, i : i + 1], attention_mask=seen, **given).logits.clone())
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("rotation", [None, HADAMARD])
@pytest.mark.parametrize("padded", [False, True])
def test_it_stores_the_codes_of_quantizing_and_copying(device, counted, monkeypatch, kind, rotation, padded):
    model = model_of(device, kind=kind, rotation=rotation)
    ids = torch.randint(1, 64, (3, 16), device=device)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
    logits, cache = decoded(model, ids, mask)
    assert counted == [False, True, True] * 5
    monkeypatch.setattr(append, "runs_on", lambda device: False)
    expected, wanted = decoded(model, ids, mask)
    assert len(counted) == 15
    tolerance = 0 if device == "cpu" else 2**-4 * expected.abs().max().item()  # kernels sum in orders of their own
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    for mine, its in zip(cache.layers, wanted.layers, strict=True):
        assert mine.cumulative_length.item() == its.cumulative_length.item() == 16 and not mine.empty
        for name, buffer in mine.buffers.items():
            assert (buffer != its.buffers[name]).float().mean() <= (0 if device == "cpu" else 1e-2), name


def test_where_it_is_not_asked_for(counted):
    """Signs, codes of four bits, a growing cache, several tokens."""
    ids = torch.randint(1, 64, (2, 16))
    decoded(model_of("cpu", rotation=Rotation("R3", "random-hadamard", 64, 64, 0)), ids)
    decoded(model_of("cpu", arithmetic="bf16", kv_cache="int4"), ids)
    model = model_of("cpu")
    decoded(model, ids, cache=DynamicCache())
    with torch.no_grad():
        cache = KVCache("fp8", model.config, max_cache_len=ROOM)
        for part in ids.split(4, 1):
            model(part, past_key_values=cache)
    assert not counted


@torch._inductor.config.patch(force_disable_caches=True)
def test_compiled_it_writes_the_cache_in_place(device, used):
    model = model_of(device, layers=2, rotation=HADAMARD)
    leave_masks_out(model)
    ids = torch.randint(1, 64, (2, 16), device=device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests compile, too
    compiled = torch.compile(model.forward, fullgraph=True, mode=None if device == "cpu" else "reduce-overhead")
    expected, _ = decoded(copy.deepcopy(model), ids)
    sources = []

    def forward(*args, **kwargs):
        if sources:
            return compiled(*args, **kwargs)
        y, code = run_and_get_code(compiled, *args, **kwargs)
        sources.extend(code)
        return y

    logits, cache = decoded(model, ids, forward=forward)
    # Inductor's elementwise kernels do not round in between, and a code has three bits.
    assert (logits - expected).norm() <= 0.05 * expected.norm()
    assert all(layer.cumulative_length == 16 for layer in cache.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (source,) = sources
    assert len(re.findall(r"quantrot\.rope_hadamard_append\.default\(", source)) == 2
    allocated = "".join(re.findall(r"empty_strided.*", source))
    assert "(2, 2, 128, 64), " not in allocated and "(2, 2, 64, 128), " not in allocated  # no tensor like the cache


def test_a_full_cache_gives_what_is_no_number_and_keeps_its_tokens(device, used):
    model = model_of(device)
    ids = torch.randint(1, 64, (1, ROOM + 1), device=device)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        kept = [{n: b.clone() for n, b in layer.buffers.items()} for layer in cache.layers]
        y = model(ids[:, -1:], past_key_values=cache).logits
    assert y.isnan().all()
    for layer, before in zip(cache.layers, kept, strict=True):
        assert all(torch.equal(buffer, before[name]) for name, buffer in layer.buffers.items())


def test_a_mask_of_another_length_than_the_caches_is_an_error(used):
    model, ids = model_of("cpu"), torch.randint(1, 64, (1, 4))
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="mask: "):
            model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1, 1, ROOM - 1, dtype=torch.bool))
