"""Linears that multiply few bfloat16 tokens by halves of their weights, on a CPU."""

import copy
import io

import pytest
import torch
from torch.func import functional_call, grad, vmap

from quantrot import formats
from quantrot.load import merge_projections
from quantrot.modules import QuantizedLinear
from tests.modules.test_linear import FORMATS, W4A8, linear
from tests.modules.test_merged import changed, model

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """As if this machine's product were fast, should it not be."""
    monkeypatch.setattr("quantrot.kernels.halves.CAPABILITY", torch.backends.cpu.get_cpu_capability())


def halved(kind: str, decoded: bool, dtype: torch.dtype = BF16, **kind_of: object) -> QuantizedLinear:
    module = linear(kind, dtype, **kind_of)
    if decoded:
        module.decode(dtype)
    module.eval().halve()
    assert bool(module._halves) == (kind != "fp8")
    return module


def calls(module: QuantizedLinear) -> list[int]:
    """Grows where it multiplies by halves."""
    counted: list[int] = []
    product = module.multiply_halves
    module.__dict__["multiply_halves"] = lambda x, *halves: counted.append(x.numel()) or product(x, *halves)
    return counted


def near(y: torch.Tensor, expected: torch.Tensor) -> None:
    """A few roundings to bfloat16 of numbers of the largest's size."""
    torch.testing.assert_close(y.double(), expected.double(), rtol=0, atol=2**-6 * expected.abs().max().item())


def exact(module: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    weight = module.dequantized(torch.float32).double()
    return module.operand(x).double() @ weight.T + module.bias.double()


@pytest.mark.parametrize("kind, fmt", [("int8", None), ("mxfp4", None), ("mxfp4", W4A8)], ids=["int8", "mxfp4", "w4a8"])
@pytest.mark.parametrize("decoded, most", [(True, 4), (False, 32)])
def test_few_tokens_are_multiplied_by_halves(kind, fmt, decoded, most):
    module = halved(kind, decoded, fmt=fmt)
    counted = calls(module)
    for shape in ((256,), (1, 256), (2, most // 2, 256)):
        x = torch.randn(shape, dtype=BF16)
        y, expected = module(x), exact(module, x)
        assert y.dtype == BF16 and y.shape == expected.shape and counted.pop() == x.numel()
        near(y.double(), expected)
    module(torch.randn(most + 1, 256, dtype=BF16)), module(torch.randn(0, 256, dtype=BF16))
    for dtype in (torch.float32, torch.float16):
        module(torch.randn(1, 256, dtype=dtype))
    module.train()(torch.randn(1, 256, dtype=BF16))
    assert not counted


def test_an_x_that_does_not_fit_is_an_error_of_any_products():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        halved("int8", True, turned=False)(torch.randn(1, 128, dtype=BF16))


def test_fp8_has_no_halves():
    assert halved("fp8", True)(torch.randn(1, 256, dtype=BF16)).isfinite().all()


@pytest.mark.parametrize("decoded", [False, True])
def test_gradients_and_transforms_of_few_tokens_are_those_of_the_whole_weight(decoded):
    """The product by halves has neither."""
    module = halved("int8", decoded, turned=False)
    counted, x = calls(module), torch.randn(2, 256, dtype=BF16, requires_grad=True)
    module(x).sum().backward()
    expected = module.dequantized(BF16).float().sum(0).expand(2, -1)
    near(x.grad.float(), expected)
    assert torch.equal(grad(lambda x: module(x).sum())(x.detach()), x.grad)
    rows = vmap(grad(lambda x: module(x).sum()))(x.detach())
    near(rows, x.grad)
    assert not counted
    with torch.no_grad():
        module(x)
    assert counted.pop()


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("change", ["write", "assign", "load", "load and assign"])
def test_halves_are_of_the_tensors_that_are_there(decoded, change):
    module, x = halved("int8", decoded), torch.randn(2, 256, dtype=BF16)
    before = module(x)
    other = formats.quantize_rows(FORMATS["int8"].weights, torch.randn(128, 256))
    state = dict(zip(module.tensor_names, other, strict=True))
    if change == "write":
        for name, tensor in state.items():
            getattr(module, name).copy_(tensor)
    elif change == "assign":
        for name, tensor in state.items():
            setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        module.load_state_dict(module.state_dict() | state, assign="assign" in change)
    counted = calls(module)
    y, expected = module(x), exact(module, x)
    near(y.double(), expected)
    assert not torch.equal(y, before) and counted


@torch.no_grad()
def test_a_functional_calls_tensors_are_used_for_a_while():
    module, x = halved("int8", False), torch.randn(2, 256, dtype=BF16)
    before = module(x)
    other = {"weight_scale": module.weight_scale * 2, "bias": module.bias * 2}
    counted = calls(module)
    for halves in (module._halves, None):
        module._halves = halves
        near(functional_call(module, other, (x,)), before * 2)
        assert not counted and torch.equal(module(x), before) and counted.pop()


def test_tensors_that_others_put_there_end_them():
    """As accelerate's hooks do at each forward: they are not made anew each time."""
    module, x = halved("int8", False), torch.randn(2, 256, dtype=BF16)
    counted, before = calls(module), module(x)
    for _ in range(3):
        module._parameters["weight_scale"] = torch.nn.Parameter(module.weight_scale * 2, requires_grad=False)
        module(x)
    near(module(x) - module.bias, 8 * (before - module.bias))
    assert len(counted) == 1 and module._halves is None


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_halves_go_with_casts_and_copies(decoded, written):
    """And are of the tensors as they are, where those were written before the copy, or after."""
    module, x = halved("mxfp4", decoded), torch.randn(2, 256, dtype=BF16)
    before = module(x) - module.bias
    if written:
        module.weight_scale.add_(1)  # exponents
    torch.save(module, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert saved._halves is None  # whose order is that of a machine
    there_and_back = copy.deepcopy(module).to(torch.float32).to(BF16)
    for same in (copy.deepcopy(module), saved, there_and_back, copy.copy(module)):
        for times in (1 + written, 2 + 2 * written):
            counted = calls(same)
            for tokens in (4, 2):  # of which more than four are multiplied by what is decoded
                y = same(x.repeat(tokens, 1))[:2]
                near(y - same.bias, times * before)
            assert counted
            same.weight_scale.add_(1)
    wide = copy.deepcopy(module).to(torch.float32)
    counted = calls(wide)
    wide(x.float())
    assert not counted and wide._halves is None


@pytest.mark.parametrize("decoded", [False, True])
def test_a_copy_counts_writes_anew(decoded):
    """Written once before it runs, its count is the one at which the original made what it keeps."""
    module, x = linear("mxfp4", BF16).eval(), torch.randn(2, 256, dtype=BF16)
    module.weight_scale.add_(1)
    if decoded:
        module.decode(BF16)
    module.halve()
    fresh = copy.deepcopy(module)
    fresh.weight_scale.add_(1)
    for tokens in (4, 2):  # of which more than four are multiplied by what is decoded
        y, expected = fresh(x.repeat(tokens, 1)), module(x.repeat(tokens, 1))
        near(y - fresh.bias, 2 * (expected - module.bias))


@pytest.mark.parametrize("decoded", [False, True])
def test_a_model_emptied_and_loaded_has_them_again(decoded):
    module, x = halved("mxfp4", decoded, turned=False), torch.randn(2, 256, dtype=BF16)
    state, before = {name: tensor.clone() for name, tensor in module.state_dict().items()}, module(x)
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    counted = calls(module)
    assert torch.equal(module(x), before) and counted


@torch.no_grad()
@pytest.mark.parametrize("decoded", [False, True])
def test_compiled_code_and_programs_have_none(decoded):
    """They do not see what is written, and may be saved for other machines."""
    module, x = halved("int8", decoded), torch.randn(1, 256, dtype=BF16)
    module(x)
    counted = calls(module)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(x), backend="aot_eager", fullgraph=True)
    exported = torch.export.export(module, (x,), strict=False).module()
    traced = [torch.jit.trace(module, x)] if decoded else []  # which fails where bytes are viewed as others
    assert not any("int4pack" in str(each.inlined_graph) for each in traced)
    counted.clear()
    for program in (compiled, exported, *traced):
        near(program(x), module(x))
        assert counted.pop() and not counted
    ranged = torch.randn(8, 256, dtype=BF16)
    torch._dynamo.mark_dynamic(ranged, 0, min=2, max=100)  # an error, were one program not enough
    near(compiled(ranged), module(ranged))
    module.load_state_dict({name: t * 2 if "scale" in name else t for name, t in module.state_dict().items()})
    near(compiled(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(
    "change", ["none", "write", "write and copy", "deepcopy", "save", "cast", "widen", "load", "assign"]
)
def test_merged_linears_have_them_together(decoded, change):
    llama = model("mxfp4", bias=True).to(BF16)
    attention = llama.model.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        if decoded:
            part.decode(BF16)
        part.halve()
    alone = copy.deepcopy(llama)
    merge_projections(llama)
    llama.eval(), alone.eval()
    llama.model.layers[0].self_attn.outputs(torch.randn(3, 256, dtype=BF16))
    assert all(getattr(llama.model.layers[0].self_attn, name)._halves is None for name in ("q_proj", "k_proj"))
    if change.startswith("write"):
        for each in (llama, alone):
            each.model.layers[0].self_attn.k_proj.weight_scale.add_(1)
    llama = changed(change, llama, alone)
    attention, before = llama.model.layers[0].self_attn, alone.model.layers[0].self_attn
    whole, x = attention.current(), torch.randn(3, 256).to(llama.dtype)
    assert whole is not None
    counted = calls(whole)
    for given in (x.repeat(2, 1), x):
        for name, y in zip(attention.parts, attention.outputs(given), strict=True):
            expected = getattr(before, name)(given)
            near(y, expected)
    assert bool(counted) == (change != "widen")


@torch.no_grad()
@pytest.mark.parametrize("decoded", [False, True])
def test_parts_that_run_apart_have_them_when_they_are_needed(decoded):
    """While one has a hook; then the whole has them again. Never both."""
    llama = model("int8").to(BF16).eval()
    attention = llama.model.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        if decoded:
            part.decode(BF16)
        part.halve()
    merge_projections(llama)
    attention, x = llama.model.layers[0].self_attn, torch.randn(1, 256, dtype=BF16)
    expected = attention.outputs(x)
    hook = attention.q_proj.register_forward_hook(lambda *of: None)
    counted = [calls(getattr(attention, name)) for name in attention.parts]
    for y, want in zip(attention.outputs(x), expected, strict=True):
        near(y, want)
    parts = [getattr(attention, name) for name in attention.parts]
    assert all(counted) and attention.merged._halves is None and all(part._halves for part in parts)
    hook.remove()
    counted = calls(attention.merged)
    attention.outputs(x)
    assert counted and not any(part._halves for part in parts)


@torch.no_grad()
def test_assigning_other_tensors_leaves_layers_merged():
    llama = model("int8")
    merge_projections(llama)
    llama.load_state_dict({"lm_head.weight": llama.lm_head.weight.clone()}, strict=False, assign=True)
    assert all(m.current() is not None for layer in llama.model.layers for m in (layer.self_attn, layer.mlp))
