"""One token that a product holds as integers: what is lost of its numbers, and what is not finite."""

import pytest
import torch

from quantrot.kernels.mxfp4 import dequantize_mxfp4, hopper, quantize_mxfp4
from tests.kernels.test_mxfp4_hopper import BF16, FP32, built, exact


@pytest.fixture(scope="module")
def product(emulated):
    """product(x, packed, scale) -> y in float32, by the emulator."""
    run = built(emulated, hopper.device_functions(), ("one_held",))
    return lambda x, packed, scale: run("one_held", x, None, packed, scale)


@pytest.mark.parametrize("power", [-100, -20, 0, 100])
def test_a_held_token_is_rounded_to_less_than_its_groups_largest_by_two_to_the_fifteen(product, power):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(1, 1152, generator=generator).mul(3).exp()
    x = (torch.randn(1, 1152, generator=generator) * sizes).mul(2.0**power).to(BF16)
    x[0, 64:96] = 0
    x[0, 96:128] = torch.tensor(255.0 * 2**power)  # all bits of bfloat16: the largest integer there is
    packed, scale = quantize_mxfp4(torch.randn(40, 1152, generator=generator))
    weight = dequantize_mxfp4(packed, scale, FP32, backend="reference").double()
    largest = x.double().abs().view(36, 32).amax(1, keepdim=True).expand(36, 32).reshape(-1)
    lost = (weight.abs() * largest).sum(1) * 2.0**-15 + (weight.abs() * x.double().abs()).sum(1) * 2.0**-22
    error = product(x, packed, scale)[0].double() - exact(x, packed, scale)[0]
    assert (error.abs() <= lost).all() and error.abs().sum() > 0


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_in_a_held_token_is_so_in_the_result(product, special):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, generator=generator).to(BF16)
    x[0, 37] = special
    packed, scale = quantize_mxfp4(torch.randn(40, 256, generator=generator))
    y = product(x, packed, scale)
    assert {0.0} < {*dequantize_mxfp4(packed, scale, FP32, backend="reference")[:, 37].tolist()}  # times infinity NaN
    torch.testing.assert_close(y.double(), exact(x, packed, scale), equal_nan=True)
