"""KV caches: what comes back depends on what went in and on nothing else, and what lies there is narrow."""

import copy
import inspect

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from quantrot import convert, load
from quantrot.kernels.attention import rope_hadamard_quantize
from quantrot.modules import KVCache, QuantizedAttention
from quantrot.modules.cache import KINDS, DynamicKVLayer, StaticKVLayer, adopt, bits_per_value, round_trip

IDS = torch.arange(2, 42).view(2, 20)
GREEDY = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
RECIPES = {
    "kv fp8": {"kv_cache": "fp8"},
    "kv int4, R3": {"kv_cache": "int4", "rotations": {"R3": {"kind": "random-hadamard", "seed": 1}}},
    "attention fp8": {"attention": "fp8", "kv_cache": "fp8"},
    "attention fp8, R3": {"attention": "fp8", "kv_cache": "fp8", "rotations": {"R3": {"kind": "hadamard"}}},
    "attention fp8, wide cache": {"attention": "fp8"},
}
kinds = pytest.mark.parametrize("kind", KINDS)
layers = pytest.mark.parametrize(
    "make", [DynamicKVLayer, lambda kind: StaticKVLayer(kind, 300)], ids=["grows", "static"]
)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "source", hidden=64, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def models(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("out")
    return {
        name: load(convert(source, recipe, root / str(i)).out, device_map="cpu")
        for i, (name, recipe) in enumerate(RECIPES.items())
    }


@pytest.fixture(params=RECIPES)
def model(request, models):
    return models[request.param]


def kv(tokens, batch=2):
    return [torch.randn(batch, 2, tokens, 32) for _ in range(2)]


# --- A layer ---------------------------------------------------------------------------------------------------------


@kinds
@layers
def test_tokens_come_back_the_same_however_they_went_in(kind, make):
    k, v = kv(150)
    expected = round_trip(kind, k, v)
    layer = make(kind)
    for start, stop in ((0, 1), (1, 130), (130, 131), (131, 150)):
        got = layer.update(k[:, :, start:stop], v[:, :, start:stop])
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == k.dtype and torch.equal(a[:, :, :stop], b[:, :, :stop])
    assert layer.get_seq_length() == 150


@layers
def test_appended_codes_are_the_codes_that_went_in(make):
    q, k, v = torch.randn(2, 200, 4, 32), *(torch.randn(2, 200, 2, 32) for _ in range(2))
    prompt = rope_hadamard_quantize(q[:, :140], k[:, :140], v[:, :140])
    rest = rope_hadamard_quantize(q[:, 140:], k[:, 140:], v[:, 140:], granularity="token")
    layer = make("fp8")
    layer.append(prompt, torch.float32)
    every, lengths = layer.append(rest, torch.float32)
    assert lengths is None or lengths.tolist() == [200, 200]
    keys = torch.cat([prompt.k.view(torch.uint8), rest.k.view(torch.uint8)], 2)
    assert torch.equal(every.k.view(torch.uint8)[:, :, :200], keys)
    values = torch.cat([prompt.v.view(torch.uint8)[..., :140], rest.v.view(torch.uint8)[..., :60]], 3)
    assert torch.equal(every.v.view(torch.uint8)[..., :200], values) and every.v.shape[3] % 128 == 0
    assert torch.equal(every.k_scale[..., 128:140], prompt.k_scale[..., 1:].expand(2, 2, 12))
    assert torch.equal(every.v_scale[..., 140:200], rest.v_scale)


@kinds
def test_cropped_tokens_leave_no_trace(kind):
    k, v = kv(60)
    layer = DynamicKVLayer(kind)
    layer.update(k[:, :, :40] + 5, v[:, :, :40])
    layer.crop(-30)
    assert layer.get_seq_length() == 10 and layer.get_mask_sizes(7) == (17, 0)
    got = layer.update(k[:, :, 10:], v[:, :, 10:])
    assert torch.equal(got[0][:, :, 10:], round_trip(kind, k, v)[0][:, :, 10:])
    with pytest.raises(ValueError, match="crop: 3; give a negative number"):
        layer.crop(3)
    assert not layer.empty
    layer.crop(-1000)
    assert layer.get_seq_length() == 0 and layer.empty


@kinds
def test_sequences_move_whole(kind):
    k, v = kv(30, batch=3)
    for move, order in (
        (lambda layer: layer.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        layer = DynamicKVLayer(kind)
        layer.update(k, v)
        move(layer)
        new = [t[:, :, :1] for t in (k, v)]
        got = layer.update(*(t[order] for t in new))
        for a, b in zip(got, round_trip(kind, k[order], v[order]), strict=True):
            assert torch.equal(a[:, :, :30], b)


@kinds
@pytest.mark.parametrize("kept", [0, 3])
def test_a_static_cache_forgets_what_was_no_number(source, kind, kept):
    """Tokens that were dropped by a reset, or by a crop."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    cache, fresh = (KVCache(kind, model.config, 16) for _ in range(2))
    embeddings = model.get_input_embeddings()(IDS[:, :6]).detach().clone()
    with torch.no_grad():
        for each in (cache, fresh) if kept else ():
            model(inputs_embeds=embeddings[:, :kept], past_key_values=each)
        model(inputs_embeds=torch.full_like(embeddings[:, kept:], torch.nan), past_key_values=cache)
        cache.crop(kept - 6) if kept else cache.reset()
        again, first = (model(IDS[:, :1], past_key_values=c).logits for c in (cache, fresh))
    assert torch.equal(again, first)


@kinds
def test_what_was_filled_in_inference_mode_is_cropped_and_reset_outside_of_it(source, kind):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    cache = KVCache(kind, model.config, 16)
    for drop in (lambda: cache.crop(-2), cache.reset):
        with torch.inference_mode():
            model(IDS[:, :5], past_key_values=cache)
        drop()
    assert int(cache.get_seq_length()) == 0


def test_a_prompt_after_a_reset_is_the_first_prompt(model):
    cache = StaticCache(config=model.config, max_cache_len=30)
    with torch.no_grad():
        first = model(IDS, past_key_values=cache).logits
        model(IDS[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(IDS, past_key_values=cache).logits, first)


@kinds
@layers
def test_a_reset_layer_is_a_new_one(kind, make):
    k, v = kv(50)
    layer = make(kind)
    layer.update(k * 3, v)
    assert not layer.empty
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.empty
    assert torch.equal(layer.update(k, v)[0][:, :, :50], round_trip(kind, k, v)[0])


@kinds
def test_a_static_layer_that_is_full_takes_no_token(kind):
    """And does not lose it in the padding of its buffers; compiled, the error is the operator's."""
    k, v = kv(40)
    layer = StaticKVLayer(kind, 40)
    layer.update(k, v)
    new = k[:, :, :1], v[:, :, :1]
    with pytest.raises(ValueError, match="max_cache_len is 40, and the cache is to hold 41 tokens; give it the length"):
        layer.update(*new)
    assert layer.get_seq_length() == 40
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        torch.compile(layer.update, backend="eager")(*new)


@kinds
def test_a_prompt_that_is_longer_than_a_static_cache_is_an_error_of_the_user(source, kind):
    base = AutoModelForCausalLM.from_pretrained(source)
    with pytest.raises(ValueError, match="max_cache_len is 16, and the cache is to hold 20 tokens"):
        base.generate(IDS, past_key_values=KVCache(kind, base.config, max_cache_len=16), **GREEDY)


@kinds
def test_what_is_stored_is_as_narrow_as_promised(kind):
    k, v = kv(256)
    layer = DynamicKVLayer(kind)
    layer.update(k, v)
    assert layer.nbytes * 8 == bits_per_value(kind, 32) * 2 * k.numel()
    assert {buffer.dtype for buffer in layer.buffers.values()} <= {torch.uint8, torch.bfloat16}


@kinds
def test_growing_copies_seldom_and_wastes_little(kind):
    layer, moves, where = DynamicKVLayer(kind), 0, None
    k, v = kv(1, batch=1)
    for tokens in range(1, 1200):
        layer.update(k, v)
        moves += layer.buffers["key"].data_ptr() != where
        where = layer.buffers["key"].data_ptr()
        assert layer.buffers["key"].shape[2] <= 1.25 * tokens + 384
    assert moves <= 8


@layers
def test_offloading_moves_what_is_stored(make):
    k, v = kv(20)
    layer = make("int4")
    layer.update(k, v)
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.update(k[:, :, :1], v[:, :, :1])[0][:, :, :20], round_trip("int4", k, v)[0])


# --- Models ----------------------------------------------------------------------------------------------------------


def test_without_a_narrow_format_nothing_changes(source, tmp_path):
    model = load(convert(source, {"attention": "bf16", "kv_cache": "bf16"}, tmp_path / "out").out, device_map="cpu")
    base = AutoModelForCausalLM.from_pretrained(source)
    assert not any(isinstance(m, QuantizedAttention) for m in model.modules())
    for options in (GREEDY, {**GREEDY, "num_beams": 3}, {**GREEDY, "cache_implementation": "static"}):
        assert torch.equal(model.generate(IDS, **options), base.generate(IDS, **options))


@pytest.mark.parametrize("room", [None, 16])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_another_number_of_sequences_is_an_error_and_changes_nothing(model, kind, room):
    cache = KVCache(kind, model.config, room)
    cache.update(*kv(5), 0)
    before = {name: buffer.clone() for name, buffer in cache.layers[0].buffers.items()}
    for batch in (1, 3):
        with pytest.raises(ValueError, match=f"keys of {batch} sequences for a cache that holds 2; take the same"):
            cache.update(*kv(2, batch), 0)
    assert cache.get_seq_length() == 5
    assert all(torch.equal(buffer, before[name]) for name, buffer in cache.layers[0].buffers.items())


@pytest.mark.parametrize("model", ["kv int4, R3", "attention fp8", "attention fp8, wide cache"], indirect=True)
def test_continuous_batching_gives_the_tokens_of_generate(model):
    paged = pytest.importorskip("transformers.generation.continuous_batching.cache").PagedAttentionCache
    if "kwargs" not in inspect.signature(paged.update).parameters:
        pytest.skip("this version of transformers has the attention implementation write the cache")
    model = copy.deepcopy(model)  # whose attention's implementation others want as it is
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist() for ids in prompts]
    model.set_attn_implementation("sdpa")
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # or it takes most of the memory there is
    made = model.generate_batch(prompts, config, continuous_batching_config=small, progress_bar=False)
    assert [result.generated_tokens for result in made.values()] == alone
    assert not any(result.error for result in made.values())


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_a_name_in_every_version_of_transformers(name):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    attention, cache = QuantizedAttention(LlamaAttention(config, 0), kv_cache="int4"), DynamicCache(config=config)
    angles = torch.ones(1, 5, 16), torch.zeros(1, 5, 16)
    with torch.no_grad():
        attention(torch.randn(1, 5, 64), angles, **{name: cache})
    assert cache.get_seq_length() == 5


def test_generate_continues_as_the_forward_says(model):
    out = model.generate(IDS, **GREEDY)
    with torch.no_grad():
        whole = model(out, use_cache=False).logits
    assert torch.equal(whole[:, 19:-1].argmax(-1), out[:, 20:])


def test_a_static_cache_generates_the_same(model):
    assert torch.equal(model.generate(IDS, cache_implementation="static", **GREEDY), model.generate(IDS, **GREEDY))


def test_padding_changes_nothing(model):
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    for options in (GREEDY, {**GREEDY, "cache_implementation": "static"}):
        padded = model.generate(IDS, attention_mask=mask, **options)
        assert torch.equal(padded[0, 20:], model.generate(IDS[:1, 7:], **options)[0, 13:])
        assert torch.equal(padded[1, 20:], model.generate(IDS[1:], **options)[0, 20:])


def test_beams_need_no_cache(model):
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 6}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


def test_a_prompt_in_pieces_is_a_prompt(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        pieces = [model(part, past_key_values=cache).logits for part in IDS.split(7, 1)]
    assert (torch.cat(pieces, 1) - whole).abs().max() <= 2e-2 * whole.abs().max()  # a block's scale is not a token's
    assert torch.equal(torch.cat(pieces, 1).argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("name", [name for name in RECIPES if "wide" not in name])
def test_tokens_after_the_prompt_have_bytes_of_their_own(models, name):
    found = []
    for sizes in ((10, 10), (10, 1, 2, 7)):
        cache = DynamicCache(config=models[name].config)
        with torch.no_grad():
            for part in IDS.split(sizes, 1):
                models[name](part, past_key_values=cache)
        found.append(cache.layers[0].buffers)  # later layers see what attention made of it
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", [name for name in RECIPES if "wide" not in name])
def test_transformers_own_empty_caches_become_narrow(models, name):
    model = models[name]
    kind = "int4" if "int4" in name else "fp8"
    with torch.no_grad():
        made = model(IDS, use_cache=True).past_key_values
        lazy, static = DynamicCache(), StaticCache(config=model.config, max_cache_len=40)
        for cache in (lazy, static):
            model(IDS, past_key_values=cache)
    assert all(type(layer) is DynamicKVLayer and layer.kind == kind for layer in (*made.layers, *lazy.layers))
    assert all(type(layer) is StaticKVLayer and layer.kind == kind for layer in static.layers)


def test_a_wide_cache_holds_what_a_narrow_one_does(models):
    """e4m3 times a power of two is exact in bfloat16, so quantizing it again gives the same codes."""
    wide = models["attention fp8, wide cache"].generate(IDS, return_dict_in_generate=True, output_logits=True, **GREEDY)
    narrow = models["attention fp8"].generate(IDS, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert torch.equal(wide.sequences, narrow.sequences)
    for a, b in zip(wide.logits, narrow.logits, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


@pytest.mark.parametrize("name", ["kv int4, R3", "attention fp8, R3"])
def test_a_compiled_step_is_the_eager_step_and_compiled_once(models, name):
    model, compilations = models[name], []

    def count(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        compilations.append(graph)
        return aot_eager(graph, inputs)

    def run(step):
        cache = StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            logits = [model(IDS, past_key_values=cache).logits[:, -1:]]
            for _ in range(4):
                logits.append(step(logits[-1].argmax(-1), past_key_values=cache).logits)
        return torch.cat(logits, 1)

    torch._dynamo.reset()
    eager, compiled = run(model), run(torch.compile(model, fullgraph=True, backend=count))
    assert (eager - compiled).abs().max() <= 1e-4 * eager.abs().max() and len(compilations) == 1


@kinds
def test_any_transformers_model_takes_one(source, kind):
    base = AutoModelForCausalLM.from_pretrained(source)
    cache = KVCache(kind, base.config)
    out = base.generate(IDS, past_key_values=cache, **GREEDY)
    assert out.shape == (2, 30) and cache.get_seq_length() == 29
    static = base.generate(IDS, past_key_values=KVCache(kind, base.config, max_cache_len=40), **GREEDY)
    assert torch.equal(static, out)


@kinds
@pytest.mark.parametrize("room", [None, 40])
def test_a_gradient_through_any_models_narrow_cache_is_an_error(source, kind, room):
    """And not one without the share of keys and values."""
    base = AutoModelForCausalLM.from_pretrained(source)
    loss = base(IDS, labels=IDS, past_key_values=KVCache(kind, base.config, max_cache_len=room)).loss
    with pytest.raises(NotImplementedError, match="no backward"):
        loss.backward()


def test_layers_that_hold_something_or_slide_stay():
    k, v = kv(3)
    cache = DynamicCache()
    cache.update(k, v, 0)
    assert adopt(cache, 0, "fp8") is None and adopt(cache, 1, "fp8").kind == "fp8" and adopt(cache, 1, "int4") is None
    sliding = MistralConfig(num_hidden_layers=1, sliding_window=8)
    assert adopt(DynamicCache(config=sliding), 0, "fp8") is None
    with pytest.raises(ValueError, match="has a sliding window; use transformers' own"):
        KVCache("fp8", sliding)
    with pytest.raises(ValueError, match="max_cache_len: 0; allowed: 1 and more, or None"):
        KVCache("fp8", LlamaConfig(num_hidden_layers=1), max_cache_len=0)
    with pytest.raises(ValueError, match="kind: 'bf16'; allowed: fp8, int4"):
        KVCache("bf16", LlamaConfig(num_hidden_layers=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_is_cropped_as_a_growing_one(source, kind):
    base = AutoModelForCausalLM.from_pretrained(source)
    caches = [KVCache(kind, base.config, max_cache_len=length) for length in (None, 40)]
    with torch.no_grad():
        for cache in caches:
            base(IDS[:1], past_key_values=cache)
            cache.crop(-7)
            assert int(cache.get_seq_length()) == 13
        grown, static = (base(IDS[:1, 13:], past_key_values=cache).logits for cache in caches)
    torch.testing.assert_close(static, grown, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="crop: 3; give a negative number"):
        caches[1].crop(3)


def test_layers_that_are_no_attention_are_refused():
    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "full_attention"])
    KVCache("fp8", config)
    config.layer_types = ["conv", "full_attention"]
    with pytest.raises(ValueError, match="layers of conv; use transformers' own DynamicCache"):
        KVCache("fp8", config)
