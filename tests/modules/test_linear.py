"""What all quantized linears share."""

import pytest
import torch
from torch.nn import functional as F

from quantrot import formats
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.modules import LINEARS, OnlineHadamard, QuantizedLinear, quantize_dequantize
from quantrot.rotation import Rotation

FORMATS = {
    "fp8": LinearFormat(WeightFormat("fp8", (128, 128), "bf16"), ActivationFormat("fp8", (1, 128), "bf16")),
    "mxfp4": LinearFormat(WeightFormat("mxfp4", (1, 32), "even"), ActivationFormat("mxfp4", (1, 32), "even")),
    "int8": LinearFormat(WeightFormat("int8", (1, 128), "bf16"), ActivationFormat("none", (0, 0), "")),
}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def linear(kind: str, dtype: torch.dtype) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    online = OnlineHadamard(Rotation("R4", "random-hadamard", 256, 32, 0))
    module = LINEARS[kind](256, 128, True, dtype, FORMATS[kind], online=online)
    stored = formats.quantize_rows(FORMATS[kind].weights, torch.randn(128, 256, generator=generator) / 16)
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
    expected = F.linear(operand, module.dequantized(given), module.bias.to(given))
    assert expected.dtype == given and torch.equal(module(x), expected)
    module.decode(dtype)
    assert torch.equal(module(x), expected)
    module.bias.data = module.bias.float()
    assert torch.equal(module(x), expected)
