"""A model's decoded tokens and an INT4 cache, which int4_attend_one stores into and reads in its codes."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import DynamicCache

from quantrot.kernels.attention import int4_token
from quantrot.kernels.attention.int4_token import NO_TURN
from quantrot.modules import KVCache
from quantrot.modules.cache import DynamicKVLayer, StaticKVLayer
from quantrot.modules.sdpa import leave_masks_out
from tests.modules import test_attention_append
from tests.modules.test_attention_append import HADAMARD, ROOM, decoded
from tests.modules.test_attention_append import device as device  # a fixture

gpu = pytest.mark.gpu


@pytest.fixture
def used(monkeypatch):
    """The operator is used without a GPU too: its plain torch."""
    monkeypatch.setattr(int4_token, "runs_on", lambda device: True)


@pytest.fixture
def counted(used, monkeypatch):
    """A list that grows with each token's kernel."""
    calls, real = [], int4_token.try_attend_one

    def called(*args, **kwargs):
        if (made := real(*args, **kwargs)) is not None:
            calls.append(kwargs["advance"])
        return made

    monkeypatch.setattr(int4_token, "try_attend_one", called)
    return calls


def model_of(device, **rest):
    """bfloat16, an INT4 cache."""
    return test_attention_append.model_of(device, **({"arithmetic": "bf16", "kv_cache": "int4"} | rest))


def close(got, expected, steps=6):
    """As many bits as bfloat16 leaves of logits behind a few layers."""
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-steps * expected.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "head_dim", "rotation"), [("llama", 64, HADAMARD), ("qwen3", 64, None), ("llama", 96, None)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_tokens_are_those_of_dequantizing_all(device, counted, monkeypatch, kind, head_dim, rotation, padded, grows):
    model = model_of(device, kind=kind, head_dim=head_dim, rotation=rotation)
    ids = torch.randint(1, 64, (3, 16), device=device)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
    logits, cache = decoded(model, ids, mask, cache=DynamicCache() if grows else None)
    assert counted == [False, True, True] * 5
    monkeypatch.setattr(int4_token, "runs_on", lambda device: False)
    expected, wanted = decoded(model, ids, mask, cache=DynamicCache() if grows else None)
    assert len(counted) == 15
    close(logits, expected, 4)
    for mine, its in zip(cache.layers, wanted.layers, strict=True):
        assert int(mine.get_seq_length()) == int(its.get_seq_length()) == 16 and not mine.empty
    for name, buffer in cache.layers[0].buffers.items():  # the second layer's tokens follow the first's output
        assert torch.equal(buffer, wanted.layers[0].buffers[name]), name


def test_without_a_gpu_all_is_dequantized_as_ever(monkeypatch):
    calls, real = [], int4_token.try_attend_one
    monkeypatch.setattr(int4_token, "try_attend_one", lambda *a, **k: calls.append(a) or real(*a, **k))
    decoded(model_of("cpu"), torch.randint(1, 64, (2, 9)))
    assert not calls


def test_where_it_is_not_used(counted):
    """Several tokens, gradients, weights that are asked for, other arithmetic, other caches, dropout."""
    ids = torch.randint(1, 64, (2, 16))
    for model in (model_of("cpu", implementation="eager"), model_of("cpu").float(), model_of("cpu", kv_cache="fp8")):
        decoded(model, ids)
    dropping = model_of("cpu").train()
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.1
    decoded(dropping, ids)
    model = model_of("cpu")
    with torch.no_grad():
        for room in (None, ROOM):
            cache = KVCache("int4", model.config, max_cache_len=room)
            for part in ids.split(4, 1):
                model(part, past_key_values=cache)
        wide = DynamicCache()
        for layer in range(3):
            wide.update(*torch.zeros(2, 2, 2, 3, 64, dtype=torch.bfloat16), layer)
        model(ids[:, :1], past_key_values=wide)
    cache = KVCache("int4", model.config)
    model(ids[:, :4], past_key_values=cache)
    model(ids[:, 4:5], past_key_values=cache)  # with gradients
    assert not counted


# --- Layers ----------------------------------------------------------------------------------------------------------


def heads(batch, tokens, device):
    """q, k, v as RoPE leaves them."""
    shapes = [(batch, tokens, n, 64) for n in (4, 2, 2)]
    return [torch.randn(shape, device=device).to(torch.bfloat16).transpose(1, 2) for shape in shapes]


def test_a_layer_that_grows_stores_and_attends_as_others_do(device, used):
    """Through the end of its room, after tokens were dropped, and after sequences have moved."""
    torch.manual_seed(0)
    mine, its, static = DynamicKVLayer("int4"), DynamicKVLayer("int4"), StaticKVLayer("int4", 512)
    prompt = heads(3, 130, device)[1:]
    for layer in (mine, its, static):
        layer.update(*prompt)
        layer.crop(-4)
    for step in range(135):
        q, k, v = heads(3, 1, device)
        y = mine.attend_one(q, k, v, NO_TURN, None, 0.125, keep=step % 2 == 0)
        key, value = its.update(k, v)
        other = static.attend_one(q, k, v, NO_TURN, None, 0.125, keep=step % 2 == 0)
        assert mine.get_seq_length() == its.get_seq_length() == int(static.get_seq_length()) == 127 + step
        assert mine.get_mask_sizes(1) == its.get_mask_sizes(1)
        if step % 20 == 0:
            wide = [t.double() for t in (q, key, value)]
            exact = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).transpose(1, 2)
            for t in (y, other):
                assert (t - exact).norm() <= 1.5 * 2**-8 * exact.norm()
        if step == 60:
            for layer in (mine, its, static):
                layer.reorder_cache(torch.tensor([2, 0, 0], device=device))
    for name, buffer in mine.buffers.items():
        assert torch.equal(buffer, its.buffers[name]), name
        assert torch.equal(buffer[:, :, :261], static.buffers[name][:, :, :261]), name


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
    monkeypatch.setattr(int4_token, "runs_on", lambda device: False)
    close(logits, run(), 4)


def test_a_static_cache_that_is_full_gives_no_number_and_stays(device, used):
    layer = StaticKVLayer("int4", 8)
    layer.update(*heads(2, 8, device)[1:])
    before = {name: buffer.clone() for name, buffer in layer.buffers.items()}
    assert layer.attend_one(*heads(2, 1, device), NO_TURN, None, 0.125, keep=False).isnan().all()
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.buffers.items())


def test_a_mask_of_another_width_and_an_offloaded_layer_have_no_kernel(device, used):
    layer = DynamicKVLayer("int4")
    layer.update(*heads(2, 6, device)[1:])
    q, k, v = heads(2, 1, device)
    for width in (6, 8):
        mask = torch.ones(1, 1, 1, width, dtype=torch.bool, device=device)
        assert layer.attend_one(q, k, v, NO_TURN, mask, 0.125, keep=False) is None
    kept, layer.buffers = layer.buffers, {name: buffer.to("meta") for name, buffer in layer.buffers.items()}
    assert layer.attend_one(q, k, v, NO_TURN, None, 0.125, keep=False) is None and layer.get_seq_length() == 6
    layer.buffers = kept
    assert layer.attend_one(q, k, v, NO_TURN, None, 0.125, keep=False) is not None and layer.get_seq_length() == 7


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_generate_gives_the_same_tokens(counted, monkeypatch, options):
    """Padded on the left, and beams, by transformers' own growing cache."""
    model, ids = model_of("cpu").float(), torch.randint(1, 64, (2, 12))
    monkeypatch.setattr(int4_token, "DTYPES", (torch.float32,))  # without ties
    ids[0, :5] = 0
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": (ids != 0).long()} | options
    made = model.generate(ids, **asked)
    assert len(counted) == 3 * 7
    monkeypatch.setattr(int4_token, "runs_on", lambda device: False)
    assert torch.equal(made, model.generate(ids, **asked))


# --- Compiled --------------------------------------------------------------------------------------------------------


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
    close(torch.cat(found), torch.cat(expected), 4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@torch._inductor.config.patch(force_disable_caches=True, emulate_precision_casts=True)
def test_compiled_it_writes_the_cache_in_place_and_no_wide_one(device, used):
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
    close(logits, expected, 4)  # Inductor's elementwise kernels do not round in between
    assert all(int(layer.cumulative_length) == 16 for layer in cache.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (source,) = sources
    assert len(re.findall(r"quantrot\.int4_attend_one\.default\(", source)) == 1
    made = "".join(re.findall(r"empty_strided.*", source))
    assert f"(2, 2, {ROOM}, 64)" not in made and "(2, 2, 128, " not in made  # neither wide keys nor a copy of the room
