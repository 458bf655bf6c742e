"""What a product of FP8 sees of its activations, in their own dtype: quantized and dequantized in one step.

On a CPU no code is made: an addition rounds to e4m3's grid, in buffers that stay (512 x 1536 elements: 1.5 ms, by the
two steps 4.5). Of few numbers each operation takes its microsecond whatever it computes, so blocks of one row that
divide it take fewer (1536: 26 us for 46).
"""

import torch
from torch import Tensor

from quantrot.kernels.fp8.operators import NO_GRADIENT, check_input, quantize_fp8_block
from quantrot.kernels.fp8.reference import (
    E4M3_MAX,
    LEAST_SCALE,
    Fp8ScaleRule,
    dequantize_fp8_block,
    round_scale,
    rounded,
    tiles,
    whole,
)
from quantrot.kernels.operators import register_no_gradient
from quantrot.kernels.scratch import LARGEST, scratch

CHUNK = LARGEST  # elements at a time
FEW = 1 << 16
LEAST = 2.0**-6  # e4m3's least normal number: the step is the same below it

torch.library.define("quantrot::fp8_round_trip", "(Tensor x, int rows, int columns, str rule) -> Tensor")


def round_trip_fp8(x: Tensor, block: tuple[int, int], rule: Fp8ScaleRule | str) -> Tensor:
    """dequantize_fp8_block of quantize_fp8_block's result, in x's dtype; on a CPU zeros lose their signs.

    x: [M, K] float32, float16 or bfloat16. block, rule, errors and the gradient that there is none of: as those of
    quantize_fp8_block.
    """
    if x.device.type != "cpu":
        return dequantize_fp8_block(*quantize_fp8_block(x, block, rule), block, x.dtype)
    return torch.ops.quantrot.fp8_round_trip(x, *block, check_input("round_trip_fp8", x, block, rule, "auto"))


def _round_trip(x: Tensor, rows: int, columns: int, rule: str) -> Tensor:
    block, scale_rule = whole((rows, columns), x.shape), Fp8ScaleRule(rule)
    if block[0] == 1 and x.numel() <= FEW and x.shape[1] % block[1] == 0:
        return _few(x.reshape(-1, block[1]).contiguous(), scale_rule).view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = max(CHUNK // max(x.shape[1], 1) // block[0], 1) * block[0]
    for start in range(0, x.shape[0], step):
        _piece(x[start : start + step], block, scale_rule, out[start : start + step])
    return out


def _few(blocks: Tensor, rule: Fp8ScaleRule) -> Tensor:
    """The same of blocks [n, columns], as _piece rounds them. Adding rounds numbers of both signs alike."""
    wide = blocks.float()
    scale = rounded(wide.abs().amax(1, keepdim=True).div_(E4M3_MAX).clamp_(min=LEAST_SCALE), rule)  # zeros stay zeros
    y = wide / scale  # at most 448.9, by a scale that bfloat16 rounds down, which becomes 448
    magic = y.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=LEAST).mul_(1.5 * 2.0**20)
    return y.add_(magic).sub_(magic).mul_(scale).to(blocks.dtype)


def _piece(x: Tensor, block: tuple[int, int], rule: Fp8ScaleRule, out: Tensor) -> None:
    edges = -x.shape[0] % block[0], -x.shape[1] % block[1]
    shape = x.shape[0] + edges[0], x.shape[1] + edges[1]
    scaled, magic = scratch(2, shape[0] * shape[1]).view(2, *shape)
    if any(edges):
        scaled.zero_()
    scaled[: x.shape[0], : x.shape[1]] = x
    each = tiles(scaled, block)
    scale = round_scale(torch.abs(each, out=tiles(magic, block)).amax(3, keepdim=True).amax(1, keepdim=True), rule)
    each.div_(scale)
    torch.abs(scaled.clamp_(-E4M3_MAX, E4M3_MAX), out=magic).clamp_(min=LEAST)
    magic.view(torch.int32).bitwise_and_(0x7F800000)  # the binade: eight steps
    scaled.add_(magic.mul_(1.5 * 2.0**20)).sub_(magic)  # 1.5 * 2^23 steps, at which an addition rounds to one
    each.mul_(scale)  # a scale of infinity or NaN makes all of its block NaN
    out.copy_(scaled[: x.shape[0], : x.shape[1]])


torch.library.impl("quantrot::fp8_round_trip", "CPU", _round_trip)


@torch.library.register_fake("quantrot::fp8_round_trip")
def _round_trip_fake(x, rows, columns, rule):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


register_no_gradient("quantrot::fp8_round_trip", NO_GRADIENT)
