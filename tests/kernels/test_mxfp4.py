"""MXFP4 codes and scales, bitwise: one table of named blocks that every implementation must meet."""

import pytest
import torch

from quantrot.kernels.mxfp4 import E2M1, ScaleRule, dequantize_mxfp4, mxfp4_gemm, power_of_two, quantize_mxfp4

INF, NAN = float("inf"), float("nan")
RULES = [rule for rule in ScaleRule if rule is not ScaleRule.absmax34]

# name: (first values of a block of 32, the rest zero; rule; scale byte; first codes)
SPECIAL_BLOCKS = {
    "all zero": ([0.0], "even", 0, [0]),
    "minus zero keeps its sign": ([-0.0, 6.0], "even", 127, [8, 7]),
    "every magnitude": ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], "even", 127, [0, 1, 2, 3, 4, 5, 6, 7]),
    "every negative": ([-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], "even", 127, [9, 10, 11, 12, 13, 14, 15]),
    "ties go to even": ([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], "even", 127, [7, 0, 2, 2, 4, 4, 6, 6]),
    "floor saturates": ([7.99], "floor", 127, [7]),
    "even rounds amax up at 7": ([7.0], "even", 128, [6]),
    "even stays below 7": ([6.99], "even", 127, [7]),
    "rceil never saturates": ([6.01], "rceil", 128, [5]),
    "rceil keeps 6": ([6.0], "rceil", 127, [7]),
    "mse prefers clipping one": ([7.0, 1.0, 1.0, 1.0, 1.0, 1.0], "mse", 127, [7, 2, 2]),
    "float32's largest": ([3.4e38], "floor", 252, [7]),
    "subnormal input": ([1e-40], "even", 0, [0]),
    "smallest scale": ([2.0**-126], "even", 0, [4]),
    "infinity": ([INF, 1.0], "even", 255, None),
    "nan": ([NAN, 1.0], "floor", 255, None),
}


def block(values):
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values)
    return x


def codes(packed):
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@pytest.mark.parametrize("name", SPECIAL_BLOCKS)
def test_special_block(name):
    values, rule, scale_byte, expected = SPECIAL_BLOCKS[name]
    packed, scale = quantize_mxfp4(block(values), rule)
    assert scale.item() == scale_byte
    if expected is None:
        assert dequantize_mxfp4(packed, scale).isnan().all()
    else:
        assert codes(packed)[0, : len(expected)].tolist() == expected


def nearest(y):
    """e2m1 of float64 magnitudes by search: nearest, ties to the even code, saturating."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    distance = (y.double().clamp(max=6)[..., None] - table).abs()
    odd = torch.arange(8) % 2
    return (distance + odd * 1e-300 + torch.where(distance == distance.min(-1, keepdim=True).values, odd, 9)).argmin(-1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_for_the_chosen_scale(rule, dtype):
    x = (torch.randn(63, 257 * 32, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[:, :96]
    packed, scale = quantize_mxfp4(x, rule)
    scaled = x.double().unflatten(-1, (-1, 32)) * 2.0 ** (127 - scale.double()).unsqueeze(-1)
    assert torch.equal(codes(packed).long() & 7, nearest(scaled.abs()).flatten(-2))
    assert torch.equal(codes(packed) >> 3 == 1, torch.signbit(x))


@pytest.mark.parametrize(
    "rule, exponent",
    [
        ("floor", lambda a: torch.floor(torch.log2(a)) - 2),
        ("rceil", lambda a: torch.ceil(torch.log2(a / 6))),
        ("even", lambda a: torch.floor(torch.log2(a * 8 / 7)) - 2),
    ],
)
def test_rule_follows_its_formula(rule, exponent):
    amax = torch.linspace(0.01, 100, 4001, dtype=torch.float64).float()
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    assert torch.equal(quantize_mxfp4(x, rule)[1][:, 0].double() - 127, exponent(amax.double()))


def test_quest_follows_the_standard_deviation():
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 500)[:, None]
    std = x.double().var(-1, correction=0).sqrt()
    expected = torch.floor(torch.log2(std * 2.92247856 / 6)) + 127
    assert torch.equal(quantize_mxfp4(x, "quest")[1][:, 0].double(), expected)


def test_absmax34_stores_three_quarters_and_never_saturates():
    x = torch.rand(200, 32, generator=torch.Generator().manual_seed(2)) + 1
    packed, scale = quantize_mxfp4(x, "absmax34")
    values = dequantize_mxfp4(packed, scale, torch.float32)
    assert (values - 0.75 * x).abs().max() <= 0.5 * scale.max().double().sub(127).exp2() * 2
    assert (x.amax(-1) * 0.75 <= 6 * power_of_two(scale[:, 0].int() - 127)).all()


def test_mse_is_never_worse_than_the_rules_it_searches():
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
    error = {r: (dequantize_mxfp4(*quantize_mxfp4(x, r), torch.float32) - x).square().sum(-1) for r in RULES}
    for rule in ("floor", "even", "rceil"):
        assert (error["mse"] <= error[rule] * (1 + 1e-6)).all()


def test_dequantize_is_exact_over_all_codes_and_scales():
    packed = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    for byte in (0, 1, 100, 127, 200, 250):
        scale = torch.full((256, 1), byte, dtype=torch.uint8)
        low = torch.tensor([(-1 if c & 8 else 1) * E2M1[c & 7] for c in range(16)], dtype=torch.float64)
        got = dequantize_mxfp4(packed, scale, torch.float32).double()
        assert torch.equal(got[:, 0], low[torch.arange(256) & 15] * 2.0 ** (byte - 127))
        assert torch.equal(got[:, 1], low[torch.arange(256) >> 4] * 2.0 ** (byte - 127))
        assert torch.equal(dequantize_mxfp4(packed, scale, torch.bfloat16).double(), got) or byte < 2


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 96), (2, 5, 64)])
def test_odd_shapes_and_strides(shape):
    x = torch.randn(*shape[:-1], shape[-1] * 2, generator=torch.Generator().manual_seed(4))[..., ::2]
    packed, scale = quantize_mxfp4(x)
    again = quantize_mxfp4(x.contiguous())
    assert torch.equal(packed, again[0]) and torch.equal(scale, again[1])
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // 32)
    assert dequantize_mxfp4(packed, scale).shape == shape


def test_columns_must_be_groups():
    with pytest.raises(ValueError, match="100 columns; MXFP4 needs a multiple of 32"):
        quantize_mxfp4(torch.zeros(2, 100))


def test_gemm_is_the_dequantized_product():
    w, x = torch.randn(48, 64), torch.randn(7, 64)
    q = quantize_mxfp4(w)
    expected = x.double() @ dequantize_mxfp4(*q, torch.float32).double().T
    assert (mxfp4_gemm(x, *q) - expected).abs().max() < 1e-5
