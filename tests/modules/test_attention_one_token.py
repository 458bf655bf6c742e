"""A model's decoded tokens through rope_attend_one: transformers' numbers and cache, nothing copied when compiled."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from quantrot.kernels.attention import one_token
from quantrot.modules import QuantizedAttention, attention
from quantrot.modules.sdpa import leave_masks_out
from quantrot.rotation import Rotation

gpu = pytest.mark.gpu
ROOM = 40


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request, monkeypatch):
    """Where the operator is used: without a GPU, its plain torch."""
    if request.param == "cpu":
        monkeypatch.setattr(one_token, "runs_on", lambda device: True)
    return request.param


def models(device, implementation="sdpa", layers=4, kind="llama"):
    """(transformers' own, the same with QuantizedAttention): bfloat16, head_dim 64."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, head_dim=64, attn_implementation=implementation, pad_token_id=0,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval().to(device)
    for p in plain.parameters():
        p.data.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else p.data.uniform_(0.5, 1.5)
    ours = copy.deepcopy(plain)
    for layer in ours.model.layers:
        layer.self_attn = QuantizedAttention(layer.self_attn)
    return plain, ours


def counted(monkeypatch):
    """A list that grows with each call of the operator by a module."""
    calls, real = [], one_token.rope_attend_one

    def called(*args, **kwargs):
        calls.append(kwargs["mask"])
        return real(*args, **kwargs)

    monkeypatch.setattr(attention.one_token, "rope_attend_one", called)
    return calls


@torch.no_grad()
def decoded(model, ids, mask=None, forward=None):
    """Logits of the last 5 of the ids, one at a time after a prompt, and the cache. mask: of padding, [B, ids]."""
    cache, prompt = StaticCache(config=model.config, max_cache_len=ROOM), ids.shape[1] - 5
    given = {"past_key_values": cache}
    model(ids[:, :prompt], attention_mask=None if mask is None else mask[:, :prompt], **given)
    logits = []
    for i in range(prompt, ids.shape[1]):
        seen = None if mask is None else mask[:, : i + 1]
        logits.append((forward or model)(ids[:, i : i + 1], attention_mask=seen, **given).logits.clone())
    return torch.cat(logits, 1).float(), cache


@pytest.mark.parametrize(
    ("kind", "padded", "loaded"),
    [("llama", False, False), ("llama", True, False), ("llama", True, True), ("qwen3", False, False)],
)
def test_decoded_tokens_are_transformers_own(device, kind, padded, loaded, monkeypatch):
    plain, ours = models(device, kind=kind)
    if loaded:  # what `quantrot.load` does to a model
        leave_masks_out(ours)
    calls = counted(monkeypatch)
    ids, mask = torch.randint(1, 64, (3, 20), device=device), None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :7], mask[2, :1] = 0, 0
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    (expected, theirs), (logits, cache) = decoded(plain, ids, mask), decoded(ours, ids, mask)
    assert len(calls) == 4 * 5
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-6 * expected.abs().max().item())
    for layer, other in zip(cache.layers, theirs.layers, strict=True):
        assert layer.cumulative_length == other.cumulative_length == 20
        close = {"rtol": 0, "atol": 2**-5 * other.keys.abs().max().item()}
        for ours_now, now in ((layer.keys, other.keys), (layer.values, other.values)):
            assert ours_now.isfinite().all()
            # The second layer's follow the first's output. What attends to nothing, padding, has whatever numbers.
            torch.testing.assert_close(
                ours_now.transpose(1, 2)[:, :20][seen], now.transpose(1, 2)[:, :20][seen], **close
            )
    first, other = cache.layers[0], theirs.layers[0]
    if kind == "llama" or device == "cpu":  # the sum of squares of a head's norm is in another order in the kernel
        assert torch.equal(first.keys, other.keys)
    assert torch.equal(first.values, other.values)


def test_what_it_is_not_for_goes_the_old_way(device, monkeypatch):
    calls = counted(monkeypatch)
    ids = torch.randint(1, 64, (1, 9), device=device)
    dropping = models(device)[1].train()
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.1
    watched = models(device, kind="qwen3")[1]
    for layer in watched.model.layers:
        layer.self_attn.k_norm.register_forward_hook(lambda *args: None)
    for model in (models(device, "eager")[1], models(device)[1].to(torch.float32), dropping, watched):
        decoded(model, ids)
    ours = models(device)[1]
    decoded(ours, ids)
    assert len(calls) == 4 * 5
    with torch.no_grad():
        ours.generate(ids, max_new_tokens=3, do_sample=False)  # a dynamic cache
    cache = StaticCache(config=ours.config, max_cache_len=ROOM)
    ours(ids[:, :4], past_key_values=cache)
    ours(ids[:, 4:5], past_key_values=cache)  # with gradients
    for kind in ({"rotation": Rotation("R3", "hadamard", 64, 64, 0)}, {"kv_cache": "fp8"}):
        plain = models(device)[0]
        for layer in plain.model.layers:
            layer.self_attn = QuantizedAttention(layer.self_attn, **kind).to(device)
        decoded(plain, ids)
    assert len(calls) == 4 * 5


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.gpu), "qwen3"])
@torch._inductor.config.patch(force_disable_caches=True)
def test_compiled_it_writes_the_cache_in_place(device, kind):
    _, ours = models(device, layers=2, kind=kind)
    leave_masks_out(ours)
    ids = torch.randint(1, 64, (2, 16), device=device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests compile, too
    compiled = torch.compile(ours.forward, fullgraph=True, mode=None if device == "cpu" else "reduce-overhead")
    expected, _ = decoded(ours, ids)
    sources = []

    def forward(*args, **kwargs):
        if sources:
            return compiled(*args, **kwargs)
        y, code = run_and_get_code(compiled, *args, **kwargs)
        sources.extend(code)
        return y

    logits, cache = decoded(ours, ids, forward=forward)
    # Inductor's elementwise kernels do not round in between.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-5 * expected.abs().max().item())
    assert all(layer.cumulative_length == 16 for layer in cache.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (source,) = sources
    calls = re.findall(r"quantrot\.rope_attend_one\.default\((.*)\)\n", source)
    angles = {tuple(re.findall(r"\bbuf\d+", call)[3:5]) for call in calls}
    masks = {re.findall(r"\bbuf\d+", call)[5] for call in calls}
    assert len(calls) == 2 and len(angles) == len(masks) == 1  # made once for all layers
    assert f"((2, 2, {ROOM}, 64), " not in "".join(re.findall(r"empty_strided.*", source))  # no tensor like the cache


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_with_a_static_cache_is_transformers_own(device, batch):
    plain, ours = models(device)
    ids = torch.randint(1, 64, (batch, 6), device=device)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[1, :3], mask[1, :3] = 0, 0
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected, got = (model.generate(ids, attention_mask=mask, **options) for model in (plain, ours))
    same = torch.ones(batch, dtype=torch.bool, device=device)  # so far: bfloat16 breaks near ties either way
    for step, (theirs, logits) in enumerate(zip(expected.logits, got.logits, strict=True)):
        error = 2**-5 * theirs.abs().max().item()
        torch.testing.assert_close(logits[same], theirs[same], rtol=0, atol=error)
        best = theirs.topk(2).values
        token = ids.shape[1] + step
        differs = expected.sequences[:, token] != got.sequences[:, token]
        assert not (same & differs & (best[:, 0] - best[:, 1] > 2 * error)).any()
        same &= ~differs
    assert step == 7 and same.any()
