"""A decoder layer of few tokens is the same with its norms, gate and residuals in the linears' kernels."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from quantrot import formats
from quantrot.formats import WIDE, ActivationFormat, LinearFormat, WeightFormat
from quantrot.kernels import mixed
from quantrot.kernels.fp8 import fused as fp8_fused
from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.mxfp4 import fused as mxfp4_fused
from quantrot.load import merge_projections
from quantrot.modules import LINEARS, QuantizedAttention, QuantizedMLP
from quantrot.modules import fp8 as modules_fp8
from quantrot.modules import int8 as modules_int8
from quantrot.modules import layer as modules_layer
from quantrot.modules import mxfp4 as modules_mxfp4
from quantrot.modules.layer import FusedLayer
from quantrot.modules.linear import OnlineHadamard
from quantrot.rotation import Rotation

FORMATS = {
    "fp8": LinearFormat(WeightFormat("fp8", (128, 128), "bf16"), ActivationFormat("fp8", (1, 128), "bf16")),
    "int8": LinearFormat(WeightFormat("int8", (1, 0), "bf16"), WIDE),
    "int8 groups": LinearFormat(WeightFormat("int8", (1, 128), "bf16"), WIDE),
    "mxfp4": LinearFormat(WeightFormat("mxfp4", (1, 32), "mse"), ActivationFormat("mxfp4", (1, 32), "even")),
    "mxfp4 A8": LinearFormat(WeightFormat("mxfp4", (1, 32), "mse"), ActivationFormat("fp8", (1, 0), "bf16")),
    "mxfp4 A16": LinearFormat(WeightFormat("mxfp4", (1, 32), "mse"), WIDE),
}
MODELS = ["llama", "mistral", "qwen2", "qwen3"]
# where a neighbour in bfloat16 does not become another code
CLOSE = [name for name in FORMATS if name not in ("mxfp4", "mxfp4 A8")]
gpu = pytest.mark.gpu
CHANGES = [
    *("tokens", "batch", "norm hook", "linear hook", "attention hook", "mlp hook", "act", "replaced", "norm dtype"),
    *("norm kind", "grad", "wide", "autocast", "norm shape", "norm epsilon", "another norm"),
    *("mlp kind", "attention kind", "every hook", "moved"),
]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def quantized(weight, fmt, dtype=torch.bfloat16, block=0):
    """A linear of this weight, behind a Hadamard in such blocks, if any."""
    rows, columns = weight.shape
    online = OnlineHadamard(Rotation("online", "hadamard", columns, block, 0)) if block else None
    new = LINEARS[fmt.weights.kind](columns, rows, False, dtype, fmt, online=online)
    for name, value in zip(new.tensor_names, formats.quantize_rows(fmt.weights, weight.data), strict=True):
        getattr(new, name).data = value
    return new


def model(kind="llama", fmt="fp8", dtype=torch.bfloat16, block=0, **sizes):
    """Every linear of the layers in a format, by name or itself, norms that do something. block: of a Hadamard in front
    of the linears that can be merged."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | sizes))).to(dtype).eval()
    for layer in whole.model.layers:
        for name, gain in layer.named_parameters():
            if name.endswith("norm.weight"):
                gain.data.uniform_(0.5, 1.5)
        for parent in (layer.self_attn, layer.mlp):
            for name, old in list(parent.named_children()):
                if isinstance(old, nn.Linear):
                    turned = block * (name not in ("o_proj", "down_proj"))
                    setattr(parent, name, quantized(old.weight, FORMATS.get(fmt, fmt), dtype, turned))
    return whole


@pytest.fixture
def packed(monkeypatch, request):
    """Without a GPU: said to have kernels, with the references behind them."""
    if "gpu" not in request.keywords:
        there = torch.compiler.assume_constant_result(lambda *sizes_device: True)
        for modules in (modules_fp8, modules_int8, modules_mxfp4):
            monkeypatch.setattr(modules, "has_kernels", there)
        for modules in (fp8_fused, mixed, mxfp4_fused):
            monkeypatch.setattr(modules, "_has_fused", there)


def changed(layer, change, hook):
    """A layer in one way or another not the one that is known."""
    if change == "norm hook":
        layer.post_attention_layernorm.register_forward_hook(hook)
    if change == "linear hook":
        layer.self_attn.o_proj.register_forward_pre_hook(hook)
    if change == "down hook":
        layer.mlp.down_proj.register_forward_pre_hook(hook)
    if change == "attention hook":
        layer.self_attn.register_forward_hook(hook)
    if change == "mlp hook":
        layer.mlp.register_forward_hook(hook)
    if change == "moved":
        add_hook_to_module(layer.self_attn.o_proj, AlignDevicesHook(execution_device="cpu"))
    if change == "act":
        layer.mlp.act_fn = nn.GELU()
    if change == "replaced":
        layer.mlp.up_proj = nn.Linear(256, 384, bias=False).bfloat16()
    if change == "norm dtype":
        layer.input_layernorm.float()
    if change == "norm kind":
        layer.input_layernorm = nn.RMSNorm(256).bfloat16()
    if change == "norm shape":
        layer.input_layernorm.weight.data = torch.ones(1).bfloat16()
    if change == "norm epsilon":
        layer.input_layernorm.variance_epsilon = torch.tensor(1e-5)
    if change == "another norm":
        layer.input_layernorm.__class__ = type("LlamaRMSNorm", (type(layer.input_layernorm),), {})
    if change == "attention kind":
        layer.self_attn.__class__ = type("Another", (QuantizedAttention,), {})
    if change == "mlp kind":
        layer.mlp.__class__ = type("Another", (QuantizedMLP,), {})


@pytest.fixture
def every_hook():
    """Registers one for all modules, until the test is over."""
    kept = []
    yield lambda hook: kept.append(nn.modules.module.register_module_forward_hook(hook))
    for handle in kept:
        handle.remove()


def count_fused(monkeypatch) -> list[dict]:
    """What `fused` is called with, but for what is also called for many tokens."""
    calls: list[dict] = []
    for kind in (LINEARS[name] for name in ("fp8", "int8", "mxfp4")):

        def fused(self, x, *, of=kind.fused, **given):
            calls.append(given)
            return of(self, x, **given)

        monkeypatch.setattr(kind, "fused", fused)
    return calls


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("kind", "fmt", "dtype", "tokens"),
    [
        ("llama", "fp8", torch.bfloat16, (1, 1)),
        ("mistral", "fp8", torch.bfloat16, (1, 1)),
        ("llama", "int8", torch.bfloat16, (1, 1)),
        ("mistral", "int8 groups", torch.float16, (1, 1)),
        ("llama", "mxfp4", torch.bfloat16, (1, 1)),
        ("mistral", "mxfp4 A16", torch.bfloat16, (1, 1)),
        ("qwen2", "int8 groups", torch.bfloat16, (1, 1)),
        ("qwen3", "fp8", torch.float16, (1, 1)),
        ("qwen3", "mxfp4", torch.bfloat16, (1, 1)),
        ("llama", "fp8", torch.bfloat16, (8, 1)),
        ("qwen3", "fp8", torch.float16, (4, 16)),
        ("llama", "mxfp4", torch.bfloat16, (8, 1)),
        ("qwen3", "mxfp4 A16", torch.bfloat16, (2, 16)),
        ("llama", "int8", torch.bfloat16, (8, 1)),
        ("qwen2", "int8 groups", torch.float16, (2, 8)),
    ],
)
def test_few_tokens_have_the_bits_of_the_layer(monkeypatch, kind, fmt, dtype, tokens):
    whole, x = model(kind, fmt, dtype), torch.randn(*tokens, 256).to(dtype)
    before = copy.deepcopy(whole.state_dict())
    rope = whole.model.rotary_emb(x, torch.arange(tokens[1])[None] + 3)
    with torch.no_grad():
        expected = [layer(x, position_embeddings=rope) for layer in whole.model.layers]
        merge_projections(whole)
        assert all(isinstance(layer, FusedLayer) for layer in whole.model.layers)
        calls = count_fused(monkeypatch)
        for layer, want in zip(whole.model.layers, expected, strict=True):
            assert torch.equal(layer(x, position_embeddings=rope), want)
        assert len(calls) == 8 and sum("residual" in call for call in calls) == 4
        assert sum(call.get("norm") is not None for call in calls) == 4
    after = whole.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("fmt", ["fp8", "int8", "mxfp4"])
def test_few_tokens_are_fused_in_compiled_code_and_any_number_exported(fmt):
    whole, x = model(fmt=fmt), torch.ones(3, 1, 256).bfloat16()
    merge_projections(whole)

    class Fuses(nn.Module):
        def forward(self, x):
            return x * whole.model.layers[0].fuses(x)

    with torch.no_grad():
        assert Fuses()(x).all() and torch.compile(Fuses(), backend="eager", fullgraph=True)(x).all()
        assert not torch.export.export(Fuses(), (x,)).module()(x).any()


@pytest.fixture
def normed(monkeypatch):
    """What a layer asks of the kernel of norms, with the reference behind it on any device."""
    calls = []

    def try_norm(x, weight, epsilon, added=None):
        calls.append(added)
        total = x if added is None else x + added
        return rms_norm(total, weight, epsilon), total

    monkeypatch.setattr(modules_layer, "try_norm", try_norm)
    return calls


@pytest.mark.parametrize("kind", MODELS)
def test_norms_with_the_addition_before_them_have_the_bits_of_the_layer(monkeypatch, normed, kind):
    whole, x = model(kind), torch.randn(2, 9, 256).bfloat16()
    rope, mask = whole.model.rotary_emb(x, torch.arange(9)[None]), torch.randn(2, 1, 9, 9).bfloat16()
    with torch.no_grad():
        expected = [layer(x, position_embeddings=rope, attention_mask=mask) for layer in whole.model.layers]
        merge_projections(whole)
        for layer, want in zip(whole.model.layers, expected, strict=True):
            assert torch.equal(layer(x, position_embeddings=rope, attention_mask=mask), want)
            assert [added is None for added in normed] == [True, False] * (len(normed) // 2)
        assert len(normed) == 4
        first = modules_layer.try_norm
        monkeypatch.setattr(
            modules_layer, "try_norm", lambda *a: None if len(a) > 3 and a[3] is not None else first(*a)
        )
        assert torch.equal(layer(x, position_embeddings=rope, attention_mask=mask), want)


@pytest.fixture
def quantizers_norm(monkeypatch, packed):
    """Quantizers are said to take norms, with the reference behind them; what they were given."""
    calls = []
    for modules, name in ((modules_fp8, "quantize_fp8_normed"), (modules_mxfp4, "mxfp4_normed")):

        def quantize(*given, of=getattr(modules, name), **options):
            calls.append(options)
            return of(*given, **options)

        there = torch.compiler.assume_constant_result(lambda *sizes_device: True)
        monkeypatch.setattr(modules, "has_normed", there)
        monkeypatch.setattr(modules, name, quantize)
    return calls


@pytest.mark.parametrize(
    ("kind", "fmt"),
    [*((kind, "fp8") for kind in MODELS), ("llama", "mxfp4"), ("qwen3", "mxfp4"), ("llama", "mxfp4 A8")],
)
def test_many_tokens_have_norms_and_the_addition_in_the_quantizers(monkeypatch, quantizers_norm, kind, fmt):
    whole, x = model(kind, fmt), torch.randn(2, 70, 256).bfloat16()
    rope = whole.model.rotary_emb(x, torch.arange(70)[None])
    with torch.no_grad():
        expected = [layer(x, position_embeddings=rope) for layer in whole.model.layers]
        merge_projections(whole)
        calls = count_fused(monkeypatch)
        for layer, want in zip(whole.model.layers, expected, strict=True):
            assert torch.equal(layer(x, position_embeddings=rope), want)
        assert sum(call["added"] is not None for call in quantizers_norm) == 2
        assert sum(call.get("norm") is not None for call in calls) == 2
        if (kind, fmt) in (("llama", "fp8"), ("qwen3", "mxfp4")):  # five seconds each
            compiled = torch.compile(layer, fullgraph=True, backend="eager")
            for several in (1, 2, 3):
                inputs = x[:1].repeat(several, 1, 1)
                assert torch.equal(compiled(inputs, position_embeddings=rope), layer(inputs, position_embeddings=rope))


@pytest.mark.parametrize("change", [*(c for c in CHANGES if c not in ("tokens", "batch")), "down hook"])
def test_many_tokens_of_a_layer_that_is_watched_run_as_they_always_did(
    monkeypatch, quantizers_norm, every_hook, change
):
    whole, x, seen = model(), torch.randn(1, 70, 256).bfloat16(), []
    merge_projections(whole)
    layer = whole.model.layers[0]
    changed(layer, change, lambda module, *values: seen.append(module))
    if change == "wide":
        layer.mlp.up_proj.decode(torch.bfloat16)
    calls = count_fused(monkeypatch)
    rope = whole.model.rotary_emb(x, torch.arange(70)[None])
    if change == "every hook":
        every_hook(lambda module, *values: seen.append(module) if module is layer.mlp else None)
    half = torch.autocast("cpu", torch.float16, enabled=change == "autocast")
    with torch.set_grad_enabled(change == "grad"), half:
        assert layer(x, position_embeddings=rope).shape == x.shape
    taken = bool(quantizers_norm) or any(call.get("norm") is not None for call in calls)
    assert not taken and len(seen) == ("hook" in change)


@pytest.mark.parametrize("change", ["norm hook", "norm dtype", "norm kind", "autocast", "every hook"])
def test_norms_that_are_watched_or_not_known_run_themselves(normed, every_hook, change):
    whole, x, seen = model(), torch.randn(1, 9, 256).bfloat16(), []
    merge_projections(whole)
    layer = whole.model.layers[0]
    for name in ("input_layernorm", "post_attention_layernorm"):
        if change == "norm hook":
            getattr(layer, name).register_forward_hook(lambda module, *values: seen.append(module))
        if change == "norm dtype":
            getattr(layer, name).float()
        if change == "norm kind":
            setattr(layer, name, nn.RMSNorm(256).bfloat16())
    if change == "every hook":
        every_hook(lambda module, *values: seen.append(module) if "RMSNorm" in type(module).__name__ else None)
    rope = whole.model.rotary_emb(x, torch.arange(9)[None])
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=change == "autocast"):
        assert layer(x, position_embeddings=rope).shape == x.shape
    assert not normed and len(seen) == 2 * ("hook" in change)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("fmt", CLOSE)
def test_tokens_one_by_one_through_a_cache_and_compiled(fmt):
    whole = model(fmt=fmt)
    ids = torch.randint(0, 64, (1, 6))
    with torch.no_grad():
        expected = whole(ids).logits
        merge_projections(whole)
        torch.testing.assert_close(whole(ids).logits, expected)
        cache = StaticCache(config=whole.config, max_cache_len=8)
        whole(ids[:, :3], past_key_values=cache)
        for i in range(3, 6):
            step = whole(ids[:, i : i + 1], past_key_values=cache).logits
            torch.testing.assert_close(step[0, 0], expected[0, i], rtol=0, atol=0.05 * expected.abs().max().item())
        layer, x = whole.model.layers[0], torch.randn(1, 1, 256).bfloat16()
        rope = whole.model.rotary_emb(x, torch.tensor([[0]]))
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for several in (1, 3, 8, 40, 70):  # the third with a number of sequences that is not known
            inputs = x.repeat(several, 1, 1)
            assert torch.equal(compiled(inputs, position_embeddings=rope), layer(inputs, position_embeddings=rope))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("fmt", ["fp8", "int8", "mxfp4"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_not_known_runs_as_the_layer_always_did(monkeypatch, every_hook, change, fmt):
    whole = model(fmt=fmt)
    merge_projections(whole)
    layer = whole.model.layers[0]
    few = {"fp8": 64, "int8": 16, "mxfp4": 32}[fmt]
    shape = {"tokens": (1, few + 1, 256), "batch": (few + 1, 1, 256)}.get(change, (1, 1, 256))
    x, seen = torch.randn(shape).bfloat16(), []
    changed(layer, change, lambda module, *values: seen.append(module))
    if change == "wide":
        layer.mlp.down_proj.decode(torch.bfloat16)
    calls = count_fused(monkeypatch)
    rope = whole.model.rotary_emb(x, torch.arange(shape[1])[None])
    if change == "every hook":
        every_hook(lambda module, *values: seen.append(module) if module is layer.mlp else None)
    half = torch.autocast("cpu", torch.float16, enabled=change == "autocast")
    with torch.set_grad_enabled(change == "grad"), half:
        assert layer(x, position_embeddings=rope).shape == x.shape
    assert not any(call.get("norm") is not None or call.get("residual") is not None for call in calls)
    assert len(seen) == ("hook" in change)


@pytest.mark.parametrize("fmt", ["fp8", "int8", "mxfp4"])
def test_without_kernels_nothing_is_compiled_anew_for_few_tokens(fmt):
    whole, graphs = model(fmt=fmt), []
    merge_projections(whole)
    layer = whole.model.layers[0]
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        for tokens in (100, 60, 33, 32, 20):
            x, rope = torch.randn(1, tokens, 256).bfloat16(), None
            rope = whole.model.rotary_emb(x, torch.arange(tokens)[None])
            assert torch.equal(compiled(x, position_embeddings=rope), layer(x, position_embeddings=rope))
    assert len(graphs) == 2  # of 100, and of any number


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(("tokens", "fused"), [(17, True), (32, True), (33, False)])
def test_up_to_32_tokens_are_one_operation_even_where_a_batch_has_a_faster_product(monkeypatch, tokens, fused):
    """As 17 and more quantized ones by 28672 x 4096: it has kernels of its own for what is around that."""
    seen = []
    monkeypatch.setattr(mxfp4_fused, "_apart", lambda x, *rest: seen.append(len(x)))
    with torch.device("meta"):
        x, weight = torch.empty(tokens, 4096).bfloat16(), torch.empty(28672, 2048, dtype=torch.uint8)
        scale, norm = torch.empty(28672, 128, dtype=torch.uint8), torch.empty(4096).bfloat16()
    for activations in ("mxfp4", "fp8", "none"):
        mxfp4_fused.mxfp4_fused(x, weight, scale, activations=activations, norm=norm)
    assert len(seen) == (0 if fused else 3)


@gpu
@pytest.mark.parametrize(
    ("fmt", "dtype", "tokens"),
    [
        ("fp8", torch.bfloat16, 1),
        ("fp8", torch.float16, 1),
        ("fp8", torch.bfloat16, 24),
        ("int8", torch.bfloat16, 1),
        ("int8 groups", torch.float16, 1),
        ("mxfp4 A16", torch.bfloat16, 1),
        ("mxfp4 A16", torch.bfloat16, 24),
    ],
)
def test_gpu_a_model_decodes_as_its_layers_always_did(fmt, dtype, tokens):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    whole = model(fmt=fmt, dtype=dtype, **sizes).cuda()
    x = torch.randn(tokens, 1, 1024, device="cuda").to(dtype)
    with torch.no_grad():
        rope = whole.model.rotary_emb(x, torch.tensor([[3]], device="cuda"))
        expected = [layer(x, position_embeddings=rope) for layer in whole.model.layers]
        merge_projections(whole)
        for layer, want in zip(whole.model.layers, expected, strict=True):
            assert isinstance(layer, FusedLayer) and layer.fuses(x) and isinstance(layer.mlp, QuantizedMLP)
            compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
            for run in (layer, compiled, compiled, compiled):
                y = run(x, position_embeddings=rope)
                assert (y.float() - want.float()).norm() < 1e-2 * want.float().norm()


@gpu
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [("fp8", torch.bfloat16), ("fp8", torch.float16), ("mxfp4", torch.bfloat16), ("mxfp4 A8", torch.bfloat16)],
)
def test_gpu_many_tokens_as_the_layers_always_did(fmt, dtype):
    """But for neighbours in 16 bits, by which a code of four bits changes by a quarter or not at all."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    whole = model(fmt=fmt, dtype=dtype, **sizes).cuda()
    x = torch.randn(3, 100, 1024, device="cuda").to(dtype)
    with torch.no_grad():
        rope = whole.model.rotary_emb(x, torch.arange(100, device="cuda")[None])
        expected = [layer(x, position_embeddings=rope) for layer in whole.model.layers]
        merge_projections(whole)
        for layer, want in zip(whole.model.layers, expected, strict=True):
            assert layer.norms(x) and not layer.fuses(x)
            compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
            for run in (layer, compiled, compiled, compiled):
                y = run(x, position_embeddings=rope)
                assert (y.float() - want.float()).norm() < (4e-2 if fmt == "mxfp4" else 1e-2) * want.float().norm()


@gpu
@pytest.mark.parametrize("fmt", ["int8", "int8 groups", "mxfp4 A16"])
def test_gpu_a_compiled_model_decodes_from_a_static_cache(fmt):
    """Token by token, recorded and replayed, as all tokens at once; what is fused is one kernel with its linear."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    whole = model(fmt=fmt, **sizes).cuda()
    ids = torch.randint(0, 64, (1, 12), device="cuda")
    with torch.no_grad():
        expected = whole(ids).logits
        merge_projections(whole)
        cache = StaticCache(config=whole.config, max_cache_len=16)
        whole(ids[:, :4], past_key_values=cache)
        step = torch.compile(whole.forward, mode="reduce-overhead", fullgraph=True)
        for i in range(4, 12):
            logits = step(ids[:, i : i + 1].clone(), past_key_values=cache).logits
            near = 0.05 * expected.abs().max().item()
            torch.testing.assert_close(logits[0, 0], expected[0, i], rtol=0, atol=near)
