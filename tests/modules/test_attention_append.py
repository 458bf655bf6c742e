"""A model's decoded tokens into an FP8 cache by rope_hadamard_append: the same codes, nothing copied."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from quantrot.kernels import attention
from quantrot.kernels.attention import append, attend, decode, rope_hadamard_quantize
from quantrot.modules import KVCache, QuantizedAttention
from quantrot.modules.cache import DynamicKVLayer, StaticKVLayer
from quantrot.modules.sdpa import leave_masks_out
from quantrot.rotation import Rotation

gpu = pytest.mark.gpu
ROOM = 40
HADAMARD = Rotation("R3", "hadamard", 64, 64, 0)
SIGNED = Rotation("R3", "random-hadamard", 64, 64, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request):
    return request.param


@pytest.fixture
def used(monkeypatch):
    """The operator is used without a GPU too: its plain torch."""
    monkeypatch.setattr(append, "runs_on", lambda device: True)


@pytest.fixture
def counted(used, monkeypatch):
    """A list that grows with each token's kernel."""
    calls, real = [], append.try_append

    def called(*args, **kwargs):
        if (made := real(*args, **kwargs)) is not None:
            calls.append(kwargs["advance"])
        return made

    monkeypatch.setattr(append, "try_append", called)
    return calls


def model_of(device, layers=3, kind="llama", implementation="sdpa", head_dim=64, **attention):
    """bfloat16, FP8 attention and cache."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, hidden_size=256, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, head_dim=head_dim, attn_implementation=implementation, pad_token_id=0,
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
    room = ROOM if isinstance(cache, StaticCache) else 0
    prompt, given = ids.shape[1] - 5, {"past_key_values": cache}
    model(ids[:, :prompt], attention_mask=None if mask is None else mask[:, :prompt], **given)
    logits = []
    for i in range(prompt, ids.shape[1]):
        seen = None if mask is None else torch.nn.functional.pad(mask[:, : i + 1], (0, max(0, room - i - 1)))
        logits.append((forward or model)(ids[:, i : i + 1], attention_mask=seen, **given).logits.clone())
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("rotation", [None, HADAMARD, SIGNED])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_it_stores_the_codes_of_quantizing_and_copying(device, counted, monkeypatch, kind, rotation, padded, grows):
    model = model_of(device, kind=kind, rotation=rotation)
    ids = torch.randint(1, 64, (3, 16), device=device)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
    logits, cache = decoded(model, ids, mask, cache=DynamicCache() if grows else None)
    assert counted == [False, True, True] * 5
    monkeypatch.setattr(append, "runs_on", lambda device: False)
    expected, wanted = decoded(model, ids, mask, cache=DynamicCache() if grows else None)
    assert len(counted) == 15
    tolerance = 0 if device == "cpu" else 2**-4 * expected.abs().max().item()  # kernels sum in orders of their own
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    for mine, its in zip(cache.layers, wanted.layers, strict=True):
        assert int(mine.get_seq_length()) == int(its.get_seq_length()) == 16 and not mine.empty
        for name, buffer in mine.buffers.items():
            assert (buffer != its.buffers[name]).float().mean() <= (0 if device == "cpu" else 1e-2), name


def test_where_it_is_not_asked_for(counted):
    """Blocks of a head, codes of four bits, several tokens, buffers elsewhere."""
    ids = torch.randint(1, 64, (2, 16))
    decoded(model_of("cpu", rotation=Rotation("R3", "random-hadamard", 64, 32, 0)), ids)
    decoded(model_of("cpu", arithmetic="bf16", kv_cache="int4"), ids)
    model = model_of("cpu")
    with torch.no_grad():
        for room in (None, ROOM):
            cache = KVCache("fp8", model.config, max_cache_len=room)
            for part in ids.split(4, 1):
                model(part, past_key_values=cache)
    layer = cache_layer(DynamicKVLayer("fp8"), *heads(2, 6, "cpu"))
    layer.buffers = {name: buffer.to("meta") for name, buffer in layer.buffers.items()}
    assert layer.append_turned(*heads(2, 1, "cpu"), None, None, keep=False) is None and layer.get_seq_length() == 6
    assert not counted


# --- A growing layer -------------------------------------------------------------------------------------------------


def heads(batch, tokens, device):
    """q, k, v as projections leave them."""
    return [torch.randn(batch, tokens, n, 64, device=device).to(torch.bfloat16) for n in (4, 2, 2)]


def cache_layer(layer, q, k, v):
    """With a prompt."""
    layer.append(rope_hadamard_quantize(q, k, v), q.dtype)
    return layer


@pytest.mark.parametrize("order", [0, 64])
def test_a_layer_that_grows_stores_and_attends_as_others_do(device, used, order):
    """Through the end of its room, after tokens were dropped, and after sequences have moved."""
    torch.manual_seed(0)
    mine, its, static = DynamicKVLayer("fp8"), DynamicKVLayer("fp8"), StaticKVLayer("fp8", 512)
    prompt = heads(3, 130, device)
    for layer in (mine, its, static):
        cache_layer(layer, *prompt)
    mine.crop(-4), its.crop(-4), static.crop(-4)
    for step in range(135):
        q, k, v = heads(3, 1, device)
        given, lengths = mine.append_turned(q, k, v, None, None, order, keep=step % 2 == 0)
        its.append(rope_hadamard_quantize(q, k, v, order=order or None, granularity="token"), q.dtype)
        other = static.append_turned(q, k, v, None, None, order, keep=step % 2 == 0)
        assert lengths.tolist() == other[1].tolist() == [127 + step] * 3
        assert mine.get_seq_length() == its.get_seq_length() == 127 + step
        assert mine.get_mask_sizes(1) == its.get_mask_sizes(1)
        if step == 60:
            for layer in (mine, its, static):
                layer.reorder_cache(torch.tensor([2, 0, 0], device=device))
    for name, buffer in mine.buffers.items():
        assert buffer.shape == its.buffers[name].shape
        wrong = (buffer != its.buffers[name]).float().mean()  # on a GPU a sum in another order may meet a code's edge
        assert wrong <= (1e-3 if order and device == "cuda" else 0), name
        assert torch.equal(buffer, static.buffers[name])
    for mask in (None, torch.rand(3, 1, 1, 512, device=device) < 0.5):
        ys = [attend(g, causal=mask is None, mask=mask, lengths=n) for g, n in ((given, lengths), other)]
        assert torch.equal(*ys)


@pytest.mark.parametrize(
    "move", [lambda cache: cache.crop(-3), lambda cache: cache.reset(), lambda cache: cache.batch_repeat_interleave(2)]
)
def test_a_cache_that_changed_between_tokens_goes_on(device, counted, monkeypatch, move):
    model, ids = model_of(device, rotation=HADAMARD), torch.randint(1, 64, (2, 16), device=device)

    def run():
        _, cache = decoded(model, ids, cache=DynamicCache())
        move(cache)
        batch = cache.layers[0].buffers["key"].shape[0] if cache.get_seq_length() else 2
        return decoded(model, ids.flip(1).repeat_interleave(batch // 2, 0), cache=cache)[0]

    logits = run()
    assert len(counted) == 2 * 3 * 5
    monkeypatch.setattr(append, "runs_on", lambda device: False)
    expected = run()
    tolerance = 0 if device == "cpu" else 2**-4 * expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_generate_gives_the_same_tokens(counted, monkeypatch, options):
    """Padded on the left, and beams, by transformers' own growing cache."""
    model, ids = model_of("cpu"), torch.randint(1, 64, (2, 12))
    ids[0, :5] = 0
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": (ids != 0).long()} | options
    made = model.generate(ids, **asked)
    assert len(counted) == 3 * 7
    monkeypatch.setattr(append, "runs_on", lambda device: False)
    assert torch.equal(made, model.generate(ids, **asked))


@gpu
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_that_grows_is_read_by_hoppers_kernel(counted, monkeypatch, padded):
    """With a mask whose rows end anywhere, too."""
    model, ids = model_of("cuda"), torch.randint(1, 64, (3, 16), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    lengths, real = [], decode.prepare

    def prepare(given, dtype, plan=None):
        run = real(given, dtype, plan)
        return lambda *moving: (lengths.append(moving[-1].tolist()), run(*moving))[1]

    monkeypatch.setattr(decode, "prepare", prepare)
    attention.READY.clear()
    decoded(model, ids, mask if padded else None, cache=DynamicCache())
    assert len(counted) == 15 and lengths == [[n] * 3 for n in range(12, 17) for _ in range(3)]


@gpu
def test_an_offloaded_layer_has_no_kernel():
    layer = cache_layer(DynamicKVLayer("fp8"), *heads(2, 6, "cuda"))
    layer.offload()
    assert layer.append_turned(*heads(2, 1, "cuda"), None, None, keep=False) is None
    layer.prefetch()
    assert layer.append_turned(*heads(2, 1, "cuda"), None, None, keep=False) is not None
    assert layer.get_seq_length() == 7


@torch._inductor.config.patch(force_disable_caches=True)
def test_compiled_a_growing_place_is_no_constant(device, used):
    model = model_of(device, layers=2, rotation=HADAMARD)
    leave_masks_out(model)
    ids = torch.randint(1, 64, (2, 24), device=device)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    expected, found = [], []
    for forward, logits in ((copy.deepcopy(model), expected), (compiled, found)):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :8], past_key_values=cache)
            torch._dynamo.utils.counters.clear()
            for i in range(8, 24):
                logits.append(forward(ids[:, i : i + 1], past_key_values=cache).logits)
    tolerance = 0 if device == "cpu" else 2**-4 * torch.cat(expected).abs().max().item()
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=tolerance)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


# --- A static cache --------------------------------------------------------------------------------------------------


@torch._inductor.config.patch(force_disable_caches=True)
def test_compiled_it_writes_the_cache_in_place(device, used):
    model = model_of(device, layers=1, rotation=HADAMARD)
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
    assert len(re.findall(r"quantrot\.rope_hadamard_append\.default\(", source)) == 1
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


@pytest.mark.parametrize("grows", [False, True])
def test_a_mask_of_another_length_than_the_caches_is_an_error(used, grows):
    model, ids = model_of("cpu"), torch.randint(1, 64, (1, 4))
    cache = DynamicCache() if grows else StaticCache(config=model.config, max_cache_len=ROOM)
    mask = torch.ones(1, 1, 1, 4 if grows else ROOM - 1, dtype=torch.bool)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="mask: "):
            model(ids[:, :1], past_key_values=cache, attention_mask=mask)
