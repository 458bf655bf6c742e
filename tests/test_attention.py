"""A recipe's attention and KV cache, from the plan to what loads, measures and describes it."""

import json

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from typer.testing import CliRunner

from quantrot import convert, load, verify
from quantrot.cli.main import app
from quantrot.kernels.attention import attend
from quantrot.llama import SUPPORTED
from quantrot.manifest import MANIFEST, read_manifest
from quantrot.modules import QuantizedAttention
from quantrot.modules.cache import DynamicKVLayer
from quantrot.plan import plan
from quantrot.recipe import load_recipe

IDS = torch.arange(2, 26).view(2, 12)


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(
        tmp_path_factory.mktemp("model") / "source", hidden=128, intermediate=256, kv_heads=2, dtype=torch.bfloat16
    )


@pytest.fixture(scope="module", params=["fp8-attention", "fp8-attention-rotated", "quarot-w4a4kv4"])
def converted(request, source, tmp_path_factory):
    return convert(source, request.param, tmp_path_factory.mktemp("out") / request.param).out


def test_the_model_attends_as_its_recipe_says(converted):
    recipe, manifest, model = load_recipe(converted.name), read_manifest(converted), load(converted, device_map="cpu")
    assert (manifest.arithmetic, manifest.kv_cache) == (recipe.attention, recipe.kv_cache)
    for layer in model.model.layers:
        attention = layer.self_attn
        assert isinstance(attention, QuantizedAttention)
        assert (attention.arithmetic, attention.kv_cache) == (recipe.attention, recipe.kv_cache)
        assert (attention.R3 is None) == (recipe.rotations.R3.kind == "none")
    with torch.no_grad():
        cache = model(IDS).past_key_values
    assert all(type(layer) is DynamicKVLayer and layer.kind == recipe.kv_cache for layer in cache.layers)
    assert model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 16)


def test_the_output_passes_its_own_verification(converted):
    assert not verify(converted, count=1, seq_len=64, device="cpu").failures


def test_plain_transformers_runs_it_wide_or_refuses_it(converted, source):
    """Without R3 the weights are the source's, and any engine is right with its own attention."""
    if converted.name == "fp8-attention":
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path)(IDS).logits for path in (converted, source))
        assert torch.equal(ours, theirs)
    else:
        with pytest.raises(ValueError, match="online-hadamard"):
            AutoModelForCausalLM.from_pretrained(converted)


def test_no_engine_is_told_of_cache_scales(converted):
    """Scales of turned keys would be wrong for every engine that does not turn them; ours are made at run time."""
    config = json.loads((converted / "config.json").read_text()).get("quantization_config") or {}
    assert config.get("kv_cache_scheme") is None
    assert not any("k_scale" in name for name in load(converted, device_map="cpu").state_dict())


def test_card_plan_and_inspect_name_both(converted, source):
    recipe = load_recipe(converted.name)
    card = (converted / "README.md").read_text()
    assert f"Attention in {recipe.attention}, KV cache in {recipe.kv_cache}" in card
    shown = CliRunner().invoke(app, ["inspect", str(converted)]).stdout
    # 2 layers x 2 x 2 heads x 32 values: 8.25 bits with a byte a head and token, 5 with 32 bits a group of 32
    size = "264 bytes" if recipe.kv_cache == "fp8" else "160 bytes"
    assert f"attention: {recipe.attention}; KV cache: {recipe.kv_cache}, " in shown and f"{size} a token" in shown
    shown = CliRunner().invoke(app, ["plan", str(source), "--recipe", converted.name]).stdout
    assert f"attention: {recipe.attention}; KV cache: {recipe.kv_cache}" in shown
    if converted.name == "fp8-attention":
        assert "attention and KV cache in its own precision" in card


def test_an_edited_manifest_is_refused(source, tmp_path):
    out = convert(source, "fp8-attention", tmp_path / "out").out
    for key, value in (("arithmetic", "fp4"), ("kv_cache", ["fp8"])):
        data = json.loads((out / MANIFEST).read_text())
        (out / MANIFEST).write_text(json.dumps({**data, key: value}))
        with pytest.raises(ValueError, match="malformed: .*convert again"):
            read_manifest(out)
        (out / MANIFEST).write_text(json.dumps(data))


def test_a_manifest_from_before_is_read_as_wide(source, tmp_path):
    out = convert(source, "rotate-only", tmp_path / "out").out
    data = json.loads((out / MANIFEST).read_text())
    for key in ("arithmetic", "kv_cache"):
        assert data.pop(key) == "bf16"
    (out / MANIFEST).write_text(json.dumps(data))
    assert read_manifest(out).arithmetic == read_manifest(out).kv_cache == "bf16"


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_a_head_that_e4m3_cannot_take_is_an_error_of_the_plan(tiny, tmp_path, head_dim):
    source = tiny(tmp_path / "model", hidden=64, heads=2, kv_heads=1, head_dim=head_dim)
    with pytest.raises(ValueError, match=f"attention: fp8 needs a head_dim .* up to 256, this model's is {head_dim}"):
        plan(source, {"attention": "fp8"})
    assert plan(source, {"kv_cache": "int4"}).recipe.kv_cache == "int4"


def test_notes_say_what_a_combination_costs(source, tiny, tmp_path):
    assert any("quantizes the whole cache at every step" in note for note in plan(source, {"attention": "fp8"}).notes)
    assert not plan(source, "fp8-attention").notes
    mistral = tiny(tmp_path / "model", model_type="mistral")
    config = json.loads((mistral / "config.json").read_text()) | {"sliding_window": 8}
    (mistral / "config.json").write_text(json.dumps(config))
    assert any("sliding window" in note for note in plan(mistral, {"kv_cache": "int4"}).notes)
    for recipe in ({"kv_cache": "int4"}, {"attention": "fp8", "kv_cache": "fp8"}):
        out = convert(mistral, recipe, tmp_path / f"out-{recipe['kv_cache']}").out
        model = load(out, device_map="cpu")
        cached = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            whole = model(cached, use_cache=False).logits
        assert torch.equal(whole[:, 11:-1].argmax(-1), cached[:, 12:])


@pytest.mark.parametrize("recipe", ["fp8-attention", {"kv_cache": "fp8"}, {"kv_cache": "int4"}])
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_gradient_through_quantized_keys_is_an_error(source, tmp_path, recipe, use_cache):
    """And not one without their share."""
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu")
    with pytest.raises(NotImplementedError, match="no backward"):
        model(IDS, labels=IDS, use_cache=use_cache).loss.backward()


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "fp8-attention", {"kv_cache": "int4"}])
def test_a_compiled_forward_needs_no_no_grad(source, tmp_path, recipe):
    """torch.compile traces the backward of what might have one: the error is left to who runs it."""
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu")
    model.model.layers = model.model.layers[:1]
    torch._dynamo.reset()
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS, use_cache=False).logits
    assert torch.equal(y, model(IDS, use_cache=False).logits) and y.requires_grad
    with pytest.raises(NotImplementedError, match="no gradient|no backward"):
        y.sum().backward()


def test_fp8_attention_has_no_weights_to_give(source, tmp_path):
    model = load(convert(source, "fp8-attention", tmp_path / "out").out, device_map="cpu")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="output_attentions: attention: fp8 has no weights to give"):
        model(IDS, output_attentions=True)


def test_fp8_attention_through_a_wide_cache_wants_masks(source, tmp_path):
    """Where an implementation has none, nothing says which keys of the cache a later chunk sees."""
    AttentionInterface.register("without_masks", sdpa_attention_forward)
    model = load(convert(source, {"attention": "fp8"}, tmp_path / "out").out, device_map="cpu")
    model.set_attn_implementation("without_masks")
    with torch.no_grad(), pytest.raises(ValueError, match="'without_masks'; set it to sdpa"):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_attention_weights_are_recorded_where_they_exist(tiny, tmp_path, model_type):
    source = tiny(tmp_path / "model", model_type=model_type)
    out = convert(source, {"rotations": {"R3": {"kind": "hadamard"}}}, tmp_path / "out").out
    model, base = load(out, device_map="cpu"), AutoModelForCausalLM.from_pretrained(source)
    for each in (model, base):
        each.set_attn_implementation("eager")
    ours, theirs = (each(IDS, output_attentions=True).attentions for each in (model, base))
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_attention_of_a_prompt_needs_no_mask(tiny, tmp_path, compiled, monkeypatch):
    """Without one it is the fast kernel's; with sdpa's own boolean masks it is the same."""
    seen = []

    def noted(given, *, mask, **options):
        seen.append(mask is not None)
        return attend(given, mask=mask, **options)

    monkeypatch.setattr("quantrot.modules.attention.attend", noted)
    source = tiny(tmp_path / "source", hidden=128, layers=1, dtype=torch.bfloat16)
    model = load(convert(source, "fp8-attention", tmp_path / "out").out, device_map="cpu")
    padding = torch.ones_like(IDS)
    padding[0, :3] = 0

    def logits(**options):
        torch.compiler.reset()
        run = torch.compile(model.forward, backend="eager") if compiled else model.forward
        return run(IDS, **options).logits

    plain, padded = logits(), logits(attention_mask=padding)
    assert seen == [False, True]
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(), plain)
    assert torch.equal(logits(attention_mask=padding)[padding.bool()], padded[padding.bool()])


@torch.no_grad()
def test_fp8_attention_looks_ahead_where_it_is_asked_to(source, tmp_path):
    """As embedding models do, by an argument or the modules' own: transformers then makes no mask of what is whole."""
    model = load(convert(source, "fp8-attention", tmp_path / "out").out, device_map="cpu")
    seen = torch.ones(1, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bool)
    expected = model(IDS, attention_mask=seen, use_cache=False).logits
    assert torch.equal(model(IDS, is_causal=False, use_cache=False).logits, expected)
    causal = model(IDS, use_cache=False).logits
    assert not torch.allclose(causal, expected, rtol=0.1)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    assert torch.equal(model(IDS, is_causal=True, use_cache=False).logits, causal)


@torch.no_grad()
def test_fp8_attention_takes_masks_that_say_seen_or_not_and_no_others(source, tmp_path):
    """Numbers, too, as `eager` makes them and users do."""
    model = load(convert(source, "fp8-attention", tmp_path / "out").out, device_map="cpu")
    padding = torch.ones_like(IDS)
    padding[0, :3] = 0
    plain, padded = model(IDS).logits, model(IDS, attention_mask=padding).logits
    seen = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    for dtype in (torch.float32, torch.bfloat16):
        for least in (-torch.inf, torch.finfo(dtype).min):
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)
            assert torch.equal(model(IDS, attention_mask=mask).logits, model(IDS, attention_mask=seen).logits)
    assert torch.equal(model(IDS, attention_mask=seen).logits, plain)
    model.set_attn_implementation("eager")
    assert torch.equal(model(IDS).logits, plain)
    kept = padding.bool()
    assert torch.equal(model(IDS, attention_mask=padding).logits[kept], padded[kept])
    with pytest.raises(
        ValueError, match="no mask of torch.float32 with other numbers than 0 and the least; set the mod"
    ):
        model(IDS, attention_mask=seen.float().log() - 1.0)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(
        ValueError, match="attention: fp8 takes no BlockMask; set the model's attention implementation to"
    ):
        model(IDS)
