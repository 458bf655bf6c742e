"""One token that a product holds as integers: what is lost of its numbers, and what is not finite."""

import pytest
import torch

from quantrot.kernels.mxfp4 import dequantize_mxfp4, hopper, quantize_mxfp4
from tests.kernels.test_mxfp4_hopper import BF16, FP32, built, exact


@pytest.fixture(scope="module")
def product(emulated):
    """product(case, x, packed, scale) -> y in float32, by the emulator."""
    run = built(emulated, hopper.device_functions(), ("one", "even_32"))
    return lambda name, x, packed, scale: run(name, x, None, packed, scale)


@pytest.mark.parametrize("power", [-100, -20, 0, 100])
def test_a_number_loses_at_most_a_32640th_of_its_groups_largest(product, power):
    """Seen one by one: a row of the weight has a single one."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(1, 1152, generator=generator).mul(3).exp()
    x = (torch.randn(1, 1152, generator=generator) * sizes).mul(2.0**power).to(BF16)
    x[0, 64:96] = 0
    x[0, 96:128] = torch.tensor(255.0 * 2**power)  # all bits of bfloat16: the largest integer there is
    y = torch.cat([product("one", x, *quantize_mxfp4(part)) for part in torch.eye(1152).split(128)], 1)[0]
    largest = x.abs().view(36, 32).amax(1, keepdim=True).expand(36, 32).reshape(-1)
    error = (y.double() - x[0].double()).abs()
    assert (error <= largest.double() / 32640).all() and error.sum() > 0


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_so_in_the_result(product, special):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, generator=generator).to(BF16)
    x[0, 37], x[0, 38], x[0, 39] = special, 3e38, -3e38
    packed, scale = quantize_mxfp4(torch.randn(40, 256, generator=generator))
    assert {0.0} < {*dequantize_mxfp4(packed, scale, FP32, backend="reference")[:, 37].tolist()}  # times infinity NaN
    expected = exact(x, packed, scale)
    torch.testing.assert_close(product("one", x, packed, scale).double(), expected, equal_nan=True)
    assert product("even_32", x, packed, scale).isnan().all()  # the group's scale is
