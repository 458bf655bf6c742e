"""transformers' growing cache, where a kernel puts a token behind the others: its numbers, and what is done to it."""

import copy
import gc
import io
import pickle
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from quantrot.kernels.attention import one_token
from quantrot.modules import QuantizedAttention, attention, room
from quantrot.rotation import Rotation
from tests.modules.test_attention_one_token import models

gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request, monkeypatch):
    """Where the kernel is used: without a GPU, its definition."""
    monkeypatch.setattr(room, "GROW", 4)
    if request.param == "cpu":
        monkeypatch.setattr(one_token, "runs_on", lambda device: True)
    return request.param


@pytest.fixture
def calls(device, monkeypatch):
    """What the kernel is asked for: (tokens that there are, whether the room is settled), or None where it refused."""
    seen, real = [], one_token.try_attend_one

    def attend(q, k, v, cos, sin, keys, values, length, *, mask, norms, epsilon, scale, settled):
        given = q, k, v, cos, sin, keys, values
        options = {"norms": norms, "epsilon": epsilon, "scale": scale}
        if device == "cuda":
            y = real(*given, length, mask=mask, **options, settled=settled)
        elif one_token.unsupported(*given, length, mask, norms):
            y = None
        else:
            whole = None if mask is None else torch.nn.functional.pad(mask, (0, keys.shape[2] - length - 1))
            y = one_token.rope_attend_one(*given, torch.tensor(length), mask=whole, **options, advance=False)
        seen.append(None if y is None else (length, settled))
        return y

    monkeypatch.setattr(attention.one_token, "try_attend_one", attend)
    return seen


@torch.no_grad()
def decoded(model, ids, cache, mask=None, prompt=5):
    """Logits of the tokens behind a prompt, one after another."""
    logits = [model(ids[:, :prompt], past_key_values=cache, attention_mask=None if mask is None else mask[:, :prompt])]
    for i in range(prompt, ids.shape[1]):
        seen = None if mask is None else mask[:, : i + 1]
        logits.append(model(ids[:, i : i + 1], past_key_values=cache, attention_mask=seen))
    return torch.cat([each.logits[:, -1:] for each in logits], 1).float()


def same(ours, theirs, tokens: int, seen=None) -> bool:
    """Whether two caches hold the same tokens: the first layer's bits, of which nothing was computed but RoPE."""
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert one.keys.shape == other.keys.shape == other.values.shape and one.get_seq_length() == tokens
        close = {"rtol": 0, "atol": 2**-5 * other.keys.abs().max().item()}
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            a, b = (t.transpose(1, 2) if seen is None else t.transpose(1, 2)[seen] for t in (a, b))
            torch.testing.assert_close(a, b, **close)
    first, other = ours.layers[0], theirs.layers[0]
    return torch.equal(first.values, other.values)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_are_transformers_own(device, calls, kind, padded):
    plain, ours = models(device, kind=kind)
    ids, mask = torch.randint(1, 64, (3, 20), device=device), None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :4], mask[2, :1] = 0, 0
    theirs, cache = DynamicCache(config=plain.config), DynamicCache(config=ours.config)
    expected, logits = decoded(plain, ids, theirs, mask), decoded(ours, ids, cache, mask)
    assert (logits.double() - expected.double()).norm() < 2**-6 * expected.double().norm()  # 0.011, torch 2.11 to 2.13
    assert same(cache, theirs, 20, None if mask is None else mask.bool())
    settled = [i not in (5, 9, 13, 17) for i in range(5, 20)]  # room for four more, each time
    assert calls == [(i, fine) for i, fine in zip(range(5, 20), settled, strict=True) for _ in range(4)]
    assert type(cache.layers[0]).__name__ == "DynamicLayer"


CHANGES = {
    "crop": lambda cache, model: cache.crop(-2),
    "several": lambda cache, model: model(torch.tensor([[3, 4]], device=model.device), past_key_values=cache),
    "order": lambda cache, model: cache.reorder_cache(torch.tensor([0], device=model.device)),
    "repeat": lambda cache, model: (cache.batch_repeat_interleave(2), cache.batch_select_indices([1])),
    "values": lambda cache, model: [setattr(layer, "values", layer.values * 2) for layer in cache.layers],
    "copy": lambda cache, model: copy.deepcopy(cache),
    "pickle": lambda cache, model: pickle.loads(pickle.dumps(cache)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_the_cache_is_seen(device, calls, change):
    plain, ours = models(device)
    ids, more = torch.randint(1, 64, (1, 8), device=device), torch.randint(1, 64, (1, 4), device=device)
    made = []
    for model in (plain, ours):
        cache = DynamicCache(config=model.config)
        decoded(model, ids, cache)
        before = copy.deepcopy(cache)
        changed = CHANGES[change](cache, model)
        cache = changed if change in ("copy", "pickle") else cache
        other = decoded(model, more, before, prompt=1)  # of the cache as it was, whose tokens are its own
        made.append((decoded(model, more, cache, prompt=1), other, cache, before))
    (expected, expected_before, *theirs), (logits, logits_before, *mine) = made
    close = {"rtol": 0, "atol": 2**-5 * expected.abs().max().item()}
    torch.testing.assert_close(logits, expected, **close)
    torch.testing.assert_close(logits_before, expected_before, **close)
    tokens = {"crop": 10, "several": 14}.get(change, 12)
    assert same(mine[0], theirs[0], tokens) and same(mine[1], theirs[1], 12)
    assert len(calls) == 4 * (3 + 4 + 4) and None not in calls


@torch.no_grad()
def test_two_layers_that_share_a_room_do_not_write_over_each_other(device, calls):
    _, ours = models(device, layers=1)
    cache, ids = DynamicCache(config=ours.config), torch.randint(1, 64, (1, 8), device=device)
    decoded(ours, ids, cache)
    shared = copy.copy(cache)
    shared.layers = [copy.copy(cache.layers[0])]
    kept = cache.layers[0].keys
    for i, each in enumerate((cache, shared)):
        ours(ids[:, i : i + 1], past_key_values=each)
    assert not torch.equal(cache.layers[0].values[:, :, 8], shared.layers[0].values[:, :, 8])
    assert torch.equal(kept, cache.layers[0].keys[:, :, :8]) and torch.equal(kept, shared.layers[0].keys[:, :, :8])
    again = DynamicCache(config=ours.config)
    decoded(ours, torch.cat([ids, ids[:, :1]], 1), again, prompt=5)
    assert torch.equal(again.layers[0].keys, cache.layers[0].keys)


@torch.no_grad()
def test_what_the_kernel_is_not_for_goes_the_old_way_and_is_not_asked_again(device, calls):
    plain, ours = models(device)
    ids = torch.randint(1, 64, (1, 9), device=device)
    cache = DynamicCache(config=ours.config)
    ours(ids[:, :5], past_key_values=cache)
    wide = torch.zeros(1, 1, 1, 6, device=device, dtype=torch.bfloat16)  # an additive mask
    for i in range(5, 8):
        ours(ids[:, i : i + 1], past_key_values=cache, attention_mask=wide)
        wide = torch.nn.functional.pad(wide, (0, 1))
    assert calls == [None] * 4 and cache.get_seq_length() == 8
    calls.clear()
    for model in (models(device, "eager")[1], models(device)[1].to(torch.float32)):
        decoded(model, ids, DynamicCache(config=model.config))
    assert calls == [None] * 4  # of float32, once a layer
    calls.clear()
    for kind in ({"rotation": Rotation("R3", "hadamard", 64, 64, 0)}, {"kv_cache": "fp8"}):
        turned = models(device)[0]
        for layer in turned.model.layers:
            layer.self_attn = QuantizedAttention(layer.self_attn, **kind).to(device)
        decoded(turned, ids, DynamicCache(config=turned.config))
    with torch.enable_grad():
        cache = DynamicCache(config=ours.config)
        ours(ids[:, :5], past_key_values=cache)
        ours(ids[:, 5:6], past_key_values=cache)
    assert not calls
    compiled = torch.compile(ours.forward, backend="eager")
    cache = DynamicCache(config=ours.config)
    compiled(ids[:, :5], past_key_values=cache)
    compiled(ids[:, 5:6], past_key_values=cache)
    assert not calls and cache.get_seq_length() == 6


@torch.no_grad()
def test_a_saved_cache_is_transformers_own_and_what_is_put_into_it_in_place_is_seen(device, calls):
    made, ids = [], torch.randint(1, 64, (1, 8), device=device)
    for model in models(device):
        cache, file = DynamicCache(config=model.config), io.BytesIO()
        decoded(model, ids, cache)
        torch.save(cache, file)
        file.seek(0)
        with torch.serialization.safe_globals([DynamicCache, DynamicLayer, torch.device]):
            loaded = torch.load(file, weights_only=True)
        assert loaded.get_seq_length() == 8
        cache = pickle.loads(pickle.dumps(cache))
        for layer in cache.layers:
            layer.values.mul_(2)
        made.append(decoded(model, ids, cache, prompt=1))
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=2**-5 * made[0].abs().max().item())
    assert len(calls) == 4 * (3 + 8)


@torch.no_grad()
def test_a_room_goes_with_what_was_in_it(device, calls):
    _, ours = models(device, layers=1)
    cache, ids = DynamicCache(config=ours.config), torch.randint(1, 64, (1, 8), device=device)
    for leave in (
        lambda: ours(ids[:, :3], past_key_values=cache),  # several tokens
        lambda: cache.reorder_cache(torch.tensor([0], device=device)),
        lambda: cache.batch_select_indices(torch.tensor([0], device=device)),
    ):
        decoded(ours, ids, cache, prompt=2)
        held = [StorageWeakRef(t.untyped_storage()) for t in (cache.layers[0].keys, cache.layers[0].values)]
        assert calls and not any(each.expired() for each in held)
        leave()
        gc.collect()
        assert all(each.expired() for each in held)


class Halving:
    def update(self, key, value, *rest, **options):
        return super().update(key / 2, value / 2, *rest, **options)


@torch.no_grad()
@pytest.mark.parametrize("of", ["class", "cache", "layer"])
@pytest.mark.parametrize("kind", [DynamicCache, partial(StaticCache, max_cache_len=9)], ids=["growing", "static"])
def test_an_update_of_somebodys_own_is_called(device, calls, kind, of):
    made, ids = [], torch.randint(1, 64, (1, 9), device=device)
    for model in models(device):
        cache = kind(config=model.config)
        if of == "class":
            cache.__class__ = type("Halved", (Halving, type(cache)), {})
        for one in {"class": [], "cache": [cache], "layer": cache.layers}[of]:
            plain = one.update
            one.update = lambda key, value, *rest, to=plain, **options: to(key / 2, value / 2, *rest, **options)
        made.append((decoded(model, ids, cache), cache))
    (expected, theirs), (logits, mine) = made
    assert torch.equal(logits, expected) and same(mine, theirs, 9) and not calls


@torch.no_grad()
def test_generate_gives_transformers_tokens(device, calls):
    plain, ours = models(device)
    ids = torch.randint(1, 64, (2, 7), device=device)
    how = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1}
    theirs, mine = (model.generate(ids, **how) for model in (plain, ours))
    assert torch.equal(theirs, mine) and len(calls) == 4 * 11
    beams = [model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False) for model in (plain, ours)]
    assert torch.equal(*beams) and None not in calls
