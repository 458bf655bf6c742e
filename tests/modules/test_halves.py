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
from tests.modules.test_merged import model

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """As if this machine's product were fast, should it not be."""
    monkeypatch.setattr("quantrot.kernels.halves.CAPABILITIES", (torch.backends.cpu.get_cpu_capability(),))


def halved(kind: str, decoded: bool, dtype: torch.dtype = BF16, **kind_of: object) -> QuantizedLinear:
    module = linear(kind, dtype, **kind_of)
    if decoded:
        module.decode(dtype)
    module.halve()
    assert (module._halves is not None) == (kind != "fp8")
    return module


def calls(module: QuantizedLinear) -> list[int]:
    """Grows where it multiplies by halves."""
    counted: list[int] = []
    product = module.multiply_halves
    module.__dict__["multiply_halves"] = lambda x: counted.append(x.numel()) or product(x)
    return counted


def exact(module: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    weight = module.dequantized(torch.float32).double()
    return module.operand(x).double() @ weight.T + module.bias.double()


@pytest.mark.parametrize("kind, fmt", [("int8", None), ("mxfp4", None), ("mxfp4", W4A8)], ids=["int8", "mxfp4", "w4a8"])
@pytest.mark.parametrize("decoded, most", [(True, 4), (False, 64)])
def test_few_tokens_are_multiplied_by_halves(kind, fmt, decoded, most):
    module = halved(kind, decoded, fmt=fmt)
    counted = calls(module)
    for shape in ((256,), (1, 256), (2, most // 2, 256)):
        x = torch.randn(shape, dtype=BF16)
        y, expected = module(x), exact(module, x)
        assert y.dtype == BF16 and y.shape == expected.shape and counted.pop() == x.numel()
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7 * expected.abs().mean().item())
    module(torch.randn(most + 1, 256, dtype=BF16)), module(torch.randn(0, 256, dtype=BF16))
    for dtype in (torch.float32, torch.float16):
        module(torch.randn(1, 256, dtype=dtype))
    assert not counted


def test_fp8_has_no_halves():
    assert halved("fp8", True)(torch.randn(1, 256, dtype=BF16)).isfinite().all()


@pytest.mark.parametrize("decoded", [False, True])
def test_gradients_and_transforms_of_few_tokens_are_those_of_the_whole_weight(decoded):
    """The product by halves has neither."""
    module = halved("int8", decoded, turned=False)
    counted, x = calls(module), torch.randn(2, 256, dtype=BF16, requires_grad=True)
    module(x).sum().backward()
    expected = module.dequantized(BF16).float().sum(0).expand(2, -1)
    torch.testing.assert_close(x.grad.float(), expected, rtol=2**-6, atol=2**-6)
    assert torch.equal(grad(lambda x: module(x).sum())(x.detach()), x.grad)
    rows = vmap(grad(lambda x: module(x).sum()))(x.detach())
    torch.testing.assert_close(rows, x.grad)
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
    torch.testing.assert_close(y.double(), expected, rtol=2**-6, atol=2**-6 * expected.abs().mean().item())
    assert not torch.equal(y, before) and bool(counted) == (change != "assign")
    assert (module._halves is None) == (change == "assign")


@torch.no_grad()
def test_a_functional_calls_tensors_are_used_for_a_while():
    module, x = halved("int8", False), torch.randn(2, 256, dtype=BF16)
    before = module(x)
    twice = functional_call(module, {"weight_scale": module.weight_scale * 2, "bias": module.bias * 2}, (x,))
    torch.testing.assert_close(twice, before * 2, rtol=2**-6, atol=2**-6)
    counted = calls(module)
    assert torch.equal(module(x), before) and counted


def test_halves_go_with_casts_and_copies():
    module, x = halved("mxfp4", False), torch.randn(2, 256, dtype=BF16)
    before = module(x)
    torch.save(module, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for same in (copy.deepcopy(module), saved, copy.deepcopy(module).to(BF16)):
        assert same._halves is not None and torch.equal(same(x), before)
        same.weight_scale.add_(1)  # exponents
        torch.testing.assert_close(same(x) - same.bias, 2 * (before - module.bias), rtol=2**-5, atol=2**-5)
    assert torch.equal(module(x), before)
    assert copy.deepcopy(module).to(torch.float32)._halves is None


@pytest.mark.parametrize("decoded", [False, True])
def test_it_is_compiled_and_exported(decoded):
    module = halved("mxfp4", decoded)
    x = [torch.randn(n, 256, dtype=BF16) for n in (1, 3, 70)]
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for each in x:
            assert torch.equal(compiled(each), module(each))
        tokens = torch.export.Dim("tokens", min=1, max=128)
        program = torch.export.export(module, (x[2],), dynamic_shapes=({0: tokens},), strict=False)
        for each in x:
            torch.testing.assert_close(program.module()(each), module(each), rtol=2**-6, atol=2**-6)


@torch.no_grad()
@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("change", ["none", "write", "deepcopy", "save", "cast", "widen", "load", "assign"])
def test_merged_linears_have_them_together(monkeypatch, decoded, change):
    monkeypatch.undo()
    fast.__wrapped__(monkeypatch)
    llama = model("mxfp4", bias=True).to(BF16)
    attention = llama.model.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        if decoded:
            part.decode(BF16)
        part.halve()
    alone = copy.deepcopy(llama)
    merge_projections(llama)
    assert all(getattr(llama.model.layers[0].self_attn, name)._halves is None for name in ("q_proj", "k_proj"))
    if change == "deepcopy":
        llama = copy.deepcopy(llama)
    if change == "save":
        torch.save(llama, file := io.BytesIO())
        llama = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    if change == "cast":
        llama = llama.to(BF16)
    if change == "widen":
        llama, alone = llama.to(torch.float32), alone.to(torch.float32)
    if change in ("load", "assign"):
        state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
        state["model.layers.0.self_attn.k_proj.weight_scale"] += 1
        for each in (llama, alone):
            each.load_state_dict(copy.deepcopy(state), assign=change == "assign")
    attention, before = llama.model.layers[0].self_attn, alone.model.layers[0].self_attn
    if change == "write":
        for each in (attention, before):
            each.k_proj.weight_scale.add_(1)
    whole, x = attention.current(), torch.randn(3, 256).to(llama.dtype)
    assert whole is not None and (whole._halves is not None) == (change != "widen")
    counted = calls(whole)
    for name, y in zip(attention.parts, attention.outputs(x), strict=True):
        expected = getattr(before, name)(x)
        torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-7 * y.abs().max().item())
    assert bool(counted) == (change != "widen")
