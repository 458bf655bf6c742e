"""Under autocast our linears do what nn.Linear does: x and y are its dtype, parameters and their gradients stay."""

import pytest
import torch
from torch import nn

from quantrot import formats
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.modules import LINEARS, Fp8TrainingLinear, Mxfp4TrainingLinear
from quantrot.modules import int8 as modules_int8

FORMATS = {
    "fp8": LinearFormat(WeightFormat("fp8", (128, 128), "bf16"), ActivationFormat("fp8", (1, 128), "bf16")),
    "mxfp4": LinearFormat(WeightFormat("mxfp4", (1, 32), "even"), ActivationFormat("mxfp4", (1, 32), "even")),
    "int8": LinearFormat(WeightFormat("int8", (1, 128), "bf16"), ActivationFormat("none", (0, 0), "")),
}


def linear(kind):
    module = LINEARS[kind](256, 128, False, torch.float32, FORMATS[kind])
    stored = formats.quantize_rows(FORMATS[kind].weights, torch.randn(128, 256) / 16)
    for name, value in zip(module.tensor_names, stored, strict=True):
        getattr(module, name).data = value
    return module


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("decoded", [False, True])
def test_a_quantized_linear_takes_and_gives_autocasts_dtype(kind, decoded):
    torch.manual_seed(0)
    module, x = linear(kind), torch.randn(3, 256)
    if decoded:
        module.decode(torch.bfloat16)
    expected = module(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), expected)
        y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, expected) and y.dtype == torch.bfloat16


def test_a_number_that_rounds_past_float16_is_none_infinite():
    """60000 is 65536 in MXFP4, which float16 has not."""
    module, x = linear("mxfp4"), torch.zeros(2, 256, dtype=torch.float16)
    x[0, 3], x[0, 40] = 60000, 1
    expected = module(x)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(module(x), expected) and expected.isfinite().all()
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), expected)


def test_what_nn_linear_does_not_cast_is_not_cast():
    codes, wide = torch.ones(3, 256, dtype=torch.int64), torch.randn(3, 256, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear("int8")(wide).dtype == torch.float64
        for layer in (linear("int8"), Fp8TrainingLinear(256, 128), Mxfp4TrainingLinear(256, 128)):
            with pytest.raises(ValueError, match="int64"):
                layer(codes)


def test_so_does_a_kernel_that_gates(monkeypatch):
    torch.manual_seed(0)
    module, x = linear("int8"), torch.randn(3, 256)
    monkeypatch.setattr(modules_int8, "has_kernels", lambda device: True)
    expected = module.gated(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module.gated(x), expected)


@pytest.mark.parametrize("kind", [Fp8TrainingLinear, Mxfp4TrainingLinear, nn.Linear])
def test_training_keeps_the_parameters_dtype(kind):
    layer, x = kind(64, 32), torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and layer(x).dtype == torch.float32
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {x.grad.dtype} == {torch.float32}


@pytest.mark.parametrize("kind", [Fp8TrainingLinear, Mxfp4TrainingLinear])
def test_a_layer_without_memory_knows_its_shapes(kind):
    y = kind(64, 32, device="meta")(torch.empty(5, 64, device="meta"))
    assert y.device.type == "meta" and y.shape == (5, 32)
