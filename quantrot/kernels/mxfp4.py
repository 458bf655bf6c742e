"""MXFP4 (OCP Microscaling v1.0): groups of 32 e2m1 values along the last dimension share one e8m0 scale.

    quantize_mxfp4    [..., K] float          -> packed uint8 [..., K/2], scale uint8 [..., K/32]
    dequantize_mxfp4  packed, scale           -> [..., K] float
    mxfp4_gemm        x [M, K] by packed weight [N, K/2] -> [M, N]

A code is sign << 3 | index into E2M1; byte j holds column 2j in its low nibble and column 2j + 1 in its high one. A
scale byte e means 2^(e - 127). Rounding is to nearest, ties to the even code; values past 6 scales saturate. -0 keeps
its sign. A group that holds a NaN or an infinity gets the scale byte 255, which dequantizes to NaN. An all-zero group
gets scale byte 0 (2^-127). Arithmetic is float32 whatever the input type.

Sources: OCP Microscaling Formats v1.0 section 6.3 (floor); QuEST, arXiv:2502.05003 (quest); Quartet, arXiv:2505.14669
(absmax34).
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
MIN_EXPONENT, MAX_EXPONENT = -127, 126  # float32 amax never asks for e8m0's 2^127
QUEST_CLIP = 2.92247856  # the Gaussian's MSE-optimal e2m1 range, in standard deviations


class ScaleRule(StrEnum):
    """How a group's power of two is chosen from its largest magnitude `amax`, or from its spread.

    floor     2^(floor(log2 amax) - 2), the OCP rule: amax lands in [4, 8), so up to a quarter of it saturates
    even      the same after rounding amax to one mantissa bit: amax lands in [3.5, 7)
    rceil     the least power of two with amax / scale <= 6: nothing saturates
    quest     2^floor(log2(2.92247856 / 6 * std)): for training on Gaussian data
    absmax34  floor's power of two, and 3/4 of the value is stored: nothing saturates, which unbiased stochastic
              rounding needs; the consumer multiplies by 4/3
    mse       floor's power of two or twice it, whichever leaves the least squared error (half of it never did on
              normal or heavy-tailed data)
    """

    floor = "floor"
    even = "even"
    rceil = "rceil"
    quest = "quest"
    absmax34 = "absmax34"
    mse = "mse"


def power_of_two(exponent: Tensor) -> Tensor:
    """2.0^exponent as float32, exact, for int32 exponents in [-126, 127]: the bits are built, no libm is called."""
    return ((exponent + 127) << 23).view(torch.float32)


def _floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) of float32 x >= 0 as int32, from the exponent bits: -127 for zero and subnormals."""
    return (x.view(torch.int32) >> 23) - 127


def _exponents(groups: Tensor, amax: Tensor, rule: ScaleRule) -> Tensor:
    """Unbiased exponent per group, int32 [..., G], of float32 groups [..., G, 32] with largest magnitude amax."""
    if rule is ScaleRule.quest:
        variance = groups.square().mean(-1) - groups.mean(-1).square()
        return _floor_log2(variance.clamp_(min=0).sqrt_() * (QUEST_CLIP / E2M1_MAX))
    if rule is ScaleRule.even:
        half = 1 << 21  # half a unit of the one mantissa bit that is kept
        return ((amax.view(torch.int32) + half) >> 23) - 129
    floor = _floor_log2(amax) - 2
    if rule is ScaleRule.rceil:
        return floor + (amax > 6 * power_of_two(floor.clamp(-126, 125))).int()
    return floor


def _round_e2m1(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 magnitudes to e2m1 in a form that has both answers: (shifted, magic).

    Adding magic = 1.5 * 2^23 steps makes the adder round to a multiple of the step, ties to even, and leaves the
    multiple in the low mantissa bits: shifted - magic is the value, `_code` reads the code. On a CPU that is half a
    dozen vector operations, under 1 ns an element against 13 ns through a table search.
    """
    y = magnitude.clamp(max=E2M1_MAX)
    binade = y.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    magic = binade.mul_(0.75 * 2**23)  # binade is 1, 2 or 4, and the step is half of it
    return y.add_(magic), magic


def _code(shifted: Tensor, magic: Tensor) -> Tensor:
    """The unsigned codes, int32, of `_round_e2m1`'s result: the multiple of the step, plus 2 for each binade."""
    twice_binade = magic.view(torch.int32) >> 22  # 299 + 2 * log2(binade)
    return shifted.view(torch.int32).bitwise_and_(15).add_(twice_binade).sub_(299)


def _least_error(magnitude: Tensor, centre: Tensor) -> Tensor:
    """The exponent among centre and centre + 1 with the least squared error; ties to the first."""
    scaled = magnitude * power_of_two(-centre).unsqueeze(-1)
    shifted, magic = _round_e2m1(scaled)
    once = shifted.sub_(magic).sub_(scaled).square_().sum(-1)
    shifted, magic = _round_e2m1(scaled.mul_(0.5))
    twice = shifted.sub_(magic).sub_(scaled).square_().sum(-1).mul_(4)
    return centre + (twice < once).int()


def quantize_mxfp4(x: Tensor, scale_rule: ScaleRule | str = ScaleRule.even) -> tuple[Tensor, Tensor]:
    """Quantize to MXFP4.

    x: [..., K] float32, float16 or bfloat16, K a multiple of 32; any strides.
    Returns (packed uint8 [..., K/2], scale uint8 [..., K/32]), contiguous. ValueError if K does not fit.
    """
    rule = ScaleRule(scale_rule)
    if x.shape[-1] % GROUP:
        raise ValueError(f"x has {x.shape[-1]} columns; MXFP4 needs a multiple of {GROUP}")
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP)).contiguous()
    magnitude = groups.abs()
    amax = magnitude.amax(-1)
    exponents = _exponents(groups, amax, rule).clamp_(MIN_EXPONENT, MAX_EXPONENT)
    if rule is ScaleRule.mse:
        exponents = _least_error(magnitude, exponents.clamp_(MIN_EXPONENT + 1, MAX_EXPONENT - 1))
    elif rule is ScaleRule.absmax34:
        magnitude.mul_(0.75)
    code = _code(*_round_e2m1(magnitude.mul_(power_of_two(-exponents).unsqueeze(-1))))
    code = code.bitwise_or_((groups.view(torch.int32) >> 28).bitwise_and_(8)).flatten(-2)
    pairs = code.to(torch.uint8).view(torch.int16)  # two codes, one in each byte
    packed = pairs.bitwise_or(pairs >> 4).to(torch.uint8)
    return packed, torch.where(torch.isfinite(amax), exponents + 127, 255).to(torch.uint8)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32]; exact in bfloat16 and float32."""
    signed = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    pairs = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), dim=-1)  # [256, 2]: what a byte holds
    values = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (-1, GROUP))
    power = power_of_two((scale.int() - 127).clamp_(min=-126))
    power = torch.where(scale == 0, 2.0**-127, torch.where(scale == 255, torch.nan, power))
    return values.mul_(power.unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp4_gemm(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transpose of an MXFP4 weight [N, K]: [..., N] in x's dtype, accumulated by `F.linear`."""
    return F.linear(x, dequantize_mxfp4(packed, scale, x.dtype), bias)
