"""One token that a product holds as integers: what is lost of its numbers, and what is not finite."""

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import Fp8ScaleRule, gate
from quantrot.kernels.mxfp4 import ScaleRule, dequantize_mxfp4, hopper, quantize_mxfp4
from quantrot.kernels.mxfp4.hopper import Turn
from tests.kernels.test_mxfp4_hopper import BESIDE, BF16, CASES, FP32, built, exact, turned


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


@pytest.fixture(scope="module")
def gated(emulated):
    """gated(case, x, ...) -> y, by the emulator; the kernel in front quantizes in one_gated and one_once_gated."""
    names, widths = ("one", "one_once", "one_gated", "one_once_gated"), (8448, 33024)
    return built(emulated, hopper.device_functions(), names, widths)


@pytest.mark.parametrize("special", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("columns", [8448, 33024])
@pytest.mark.parametrize("name", ["one_gated", "one_once_gated"])
def test_a_token_that_its_gates_kernel_quantizes_has_the_bits_of_the_operations(gated, name, columns, special):
    """Groups of zeros, of subnormals, of large numbers. Threads take several turns, of 33024 in both kernels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2 * columns, generator=generator).to(BF16)
    x[:, 128:256] *= torch.tensor([0.0, 2.0**-120, 2.0**-30, 2.0**40]).repeat_interleave(32).to(BF16)
    x[0, 300] *= special
    packed, scale = quantize_mxfp4(torch.randn(16, columns, generator=generator))
    expected = gated(name.removesuffix("_gated"), *turned(gate(x), BESIDE[name][1]), packed, scale).to(BF16)
    for seed in range(2):
        y = gated(name, x, None, packed, scale, seed, residual=torch.zeros(1, 16, dtype=BF16))
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_a_gated_token_is_laid_down_for_products_whose_blocks_hold_all_of_it():
    turn = Turn(ScaleRule.even, 32)
    laid = {name: hopper.before(CASES[name][0], turn, gated=True).laid for name in ("one", "one_split")}
    assert laid == {"one": "HELD", "one_split": "PLAIN"}


@pytest.mark.parametrize(
    ("turn", "laid", "rule"),
    [
        (Turn(ScaleRule.even, 32), "0, quantrot::AS_HELD, 0", "1, quantrot::EVEN, quantrot::HELD, quantrot::GATED"),
        (
            Turn(Fp8ScaleRule.bf16, 0),
            "0, quantrot::FP8_BF16, 0",
            "0, quantrot::AS_IS, quantrot::PLAIN, quantrot::GATED",
        ),
    ],
)
def test_a_product_takes_a_gated_token_as_the_kernel_in_front_lays_it_down(monkeypatch, turn, laid, rule):
    """Seen in the kernels that are asked for, in the order of that."""
    asked = []
    monkeypatch.setattr(nvrtc, "load_kernel", lambda source, *rest: asked.append(source.rpartition("extern")[2]) or 1)
    monkeypatch.setattr(nvrtc, "processors", lambda device: hopper.PROCESSORS)
    packed, scale = quantize_mxfp4(torch.randn(64, 512))
    hopper._kernel.cache_clear(), hopper._arrange_kernel.cache_clear()
    hopper.prepare(torch.zeros(1, 1024, dtype=BF16), packed, scale, BF16, turn=turn, gated=True)
    hopper._kernel.cache_clear(), hopper._arrange_kernel.cache_clear()
    front, product = asked
    assert rule in front and laid in product
