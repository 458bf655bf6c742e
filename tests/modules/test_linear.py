"""What all quantized linears share."""

import pytest
import torch
from torch.nn import functional as F

from quantrot import formats
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.modules import LINEARS, Fp8TrainingLinear, OnlineHadamard, QuantizedLinear, quantize_dequantize
from quantrot.rotation import Rotation

FORMATS = {
    "fp8": LinearFormat(WeightFormat("fp8", (128, 128), "bf16"), ActivationFormat("fp8", (1, 128), "bf16")),
    "mxfp4": LinearFormat(WeightFormat("mxfp4", (1, 32), "even"), ActivationFormat("mxfp4", (1, 32), "even")),
    "int8": LinearFormat(WeightFormat("int8", (1, 128), "bf16"), ActivationFormat("none", (0, 0), "")),
}
W4A8 = LinearFormat(WeightFormat("mxfp4", (1, 32), "even"), ActivationFormat("fp8", (1, 0), "bf16"))
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def linear(kind: str, dtype: torch.dtype, turned: bool = True, fmt: LinearFormat | None = None) -> QuantizedLinear:
    generator, fmt = torch.Generator().manual_seed(0), fmt or FORMATS[kind]
    online = OnlineHadamard(Rotation("R4", "random-hadamard", 256, 32, 0)) if turned else None
    module = LINEARS[kind](256, 128, True, dtype, fmt, online=online)
    stored = formats.quantize_rows(fmt.weights, torch.randn(128, 256, generator=generator) / 16)
    for name, value in zip(module.tensor_names, stored, strict=True):
        getattr(module, name).data = value
    module.bias.data = torch.randn(128, generator=generator).to(dtype)
    return module


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_x_may_be_in_another_dtype_than_the_model(kind, dtype, given):
    """As after peft's prepare_model_for_kbit_training; the weight is what x's dtype makes of the stored one."""
    module, x = linear(kind, dtype), torch.randn(3, 256).to(given)
    operand = quantize_dequantize(module.turned(x), module.format.activations)
    work = torch.float32 if kind == "mxfp4" and given == torch.float16 else given  # the largest codes overflow
    weight, bias = module.dequantized(given).to(work), module.bias.to(given).to(work)
    expected = F.linear(operand.to(work), weight, bias).to(given)
    assert torch.equal(module(x), expected)
    module.decode(dtype)
    assert torch.equal(module(x), expected)
    module.bias.data = module.bias.float()
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_that_is_no_wide_float_is_an_error(kind, decoded, autocast):
    module = linear(kind, torch.float32, turned=False)
    if decoded:
        module.decode(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
            with pytest.raises(ValueError, match=f"x: {dtype}; allowed: torch.float32, torch.float16, torch.bfloat16"):
                module(torch.ones(3, 256).to(dtype))


def test_weights_alone_in_8_bits_take_float64():
    module, x = linear("int8", torch.float32), torch.randn(3, 256).double()
    expected = F.linear(module.turned(x), module.dequantized(torch.float64), module.bias.double())
    compiled = torch.compile(lambda x: module(x), backend="eager", fullgraph=True)
    assert torch.equal(module(x), expected) and torch.equal(compiled(x), expected)


@pytest.mark.parametrize("decoded", [False, True])
def test_the_gradient_of_a_transform_that_the_quantizer_does_is_the_transforms(decoded):
    rotation = Rotation("R4", "hadamard", 256, 64, 0)
    module = LINEARS["mxfp4"](256, 128, False, torch.float32, FORMATS["mxfp4"], online=OnlineHadamard(rotation))
    stored = formats.quantize_rows(FORMATS["mxfp4"].weights, torch.randn(128, 256) / 16)
    for name, value in zip(module.tensor_names, stored, strict=True):
        getattr(module, name).data = value
    if decoded:
        module.decode(torch.float32)
    x, grad = torch.randn(5, 256, requires_grad=True), torch.randn(5, 128)
    assert module.fused_hadamard() == 64
    module(x).backward(grad)
    eye = torch.eye(256)
    torch.testing.assert_close(x.grad, grad @ module.dequantized(torch.float32) @ module.turned(eye).T)


@pytest.mark.parametrize("turned", [False, True])
def test_mxfp4_of_float16_does_not_overflow_on_the_way(turned):
    """60000 rounds to 65536, and 64 times 15000 turned is 120000: no float16 numbers, but their products are."""
    online = OnlineHadamard(Rotation("R4", "hadamard", 256, 64, 0)) if turned else None
    module = LINEARS["mxfp4"](256, 128, False, torch.float16, FORMATS["mxfp4"], online=online)
    stored = formats.quantize_rows(FORMATS["mxfp4"].weights, torch.randn(128, 256) / 2**12)
    for name, value in zip(module.tensor_names, stored, strict=True):
        getattr(module, name).data = value
    assert module.fused_hadamard() == (64 if turned else 0)
    x = torch.zeros(3, 256, dtype=torch.float16)
    x[0, 5], x[1, 64:128] = 60000, 15000
    assert not quantize_dequantize(x, module.format.activations, module.fused_hadamard()).isfinite().all()
    y, wide = module(x), module.float()(x.float())
    assert wide.abs().max() < 65000 and y.dtype == torch.float16
    torch.testing.assert_close(y.float(), wide, rtol=2e-3, atol=2e-3 * wide.abs().max().item())


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("decoded", [False, True])
def test_what_adapters_in_front_train_through(kind, decoded):
    """MXFP4 and INT8 as they are; FP8's activations have no gradient, and the error's way out has."""
    module, x = linear(kind, torch.float32, turned=False), torch.randn(5, 256, requires_grad=True)
    grad = torch.randn(5, 128)
    if decoded:
        module.decode(torch.float32)
    if kind == "fp8":
        with pytest.raises(
            RuntimeError, match=r"no gradient.* put Fp8TrainingLinear.of\(linear\) in .* with requires_"
        ):
            module(x).backward(grad)
        module = Fp8TrainingLinear.of(module).requires_grad_(False)
    module(x).backward(grad)
    weight = module.weight.float() if kind == "fp8" else module.dequantized(torch.float32)
    expected = grad @ weight
    error = ((x.grad - expected).norm() / expected.norm()).item()
    assert error < (0.045 if kind == "fp8" else 1e-5) and all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("decoded", [False, True])
def test_w4a8_passes_gradients_as_its_kernels_do(decoded):
    module, x = linear("mxfp4", torch.float32, fmt=W4A8), torch.randn(5, 256, requires_grad=True)
    if decoded:
        module.decode(torch.float32)
    grad = torch.randn(5, 128)
    module(x).backward(grad)
    turned = module.turned(torch.eye(256))
    torch.testing.assert_close(x.grad, grad @ module.dequantized(torch.float32) @ turned.T)


@pytest.mark.parametrize("kind", LINEARS)
def test_an_assigned_weight_is_the_one_that_is_multiplied(kind):
    module, x = linear(kind, torch.float32), torch.randn(3, 256)
    other = formats.quantize_rows(FORMATS[kind].weights, torch.randn(128, 256))
    module.decode(torch.float32)
    before = module(x)
    for name, value in zip(module.tensor_names, other, strict=True):
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    weight = formats.dequantize(FORMATS[kind].weights, other, 256, torch.float32)
    expected = module.multiply_wide(x, weight)
    assert torch.equal(module(x), expected) and not torch.equal(before, expected)
    module.decode(torch.float32)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_scale_that_is_trained_has_a_gradient(kind):
    module = linear(kind, torch.float32)
    scale = getattr(module, module.tensor_names[1]).requires_grad_()
    module.dequantized(torch.float32).sum().backward()
    assert scale.grad.norm() > 0


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_decoded_again(assign):
    module = linear("int8", torch.float32)
    state = linear("int8", torch.float32).state_dict()
    state["weight_packed"] = state["weight_packed"].flip(0)
    module.decode(torch.float32)
    module.load_state_dict(state, assign=assign)
    assert module._decoded is not None and torch.equal(module._decoded, module.dequantized(torch.float32))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_whose_codes_were_cast_is_an_error(assign):
    module = linear("int8", torch.float32)
    before, state = module.dequantized(torch.float32), module.state_dict()
    state = {name: value.float() for name, value in state.items()}  # of four bytes in an int32 the last goes
    with pytest.raises(RuntimeError, match="weight_packed is torch.float32, not torch.int32"):
        module.load_state_dict(state, assign=assign)
    assert torch.equal(module.dequantized(torch.float32), before)


def test_a_state_dict_of_wide_weights_is_an_error_and_one_of_widened_scales_none():
    module, wide = linear("fp8", torch.float32), torch.randn(128, 256)
    with pytest.raises(RuntimeError, match="weight is torch.float32, not torch.float8_e4m3fn"):
        module.load_state_dict({"weight": wide}, strict=False)
    module = linear("int8", torch.float32)
    before, state = module.dequantized(torch.float32), module.state_dict()
    module.load_state_dict(state | {"weight_scale": state["weight_scale"].float()})
    assert torch.equal(module.dequantized(torch.float32), before)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("decoded", [False, True])
def test_type_casts_no_stored_tensor(kind, decoded):
    module, like = linear(kind, torch.float32), linear(kind, torch.float32)
    if decoded:
        module.decode(torch.float32), like.decode(torch.float32)
    x = torch.randn(3, 256, dtype=torch.float16)
    module.type(torch.float16), like.to(torch.float16)
    assert module.bias.dtype == torch.float16 and torch.equal(module(x), like(x))
    for got, expected in zip(module.stored(), like.stored(), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
