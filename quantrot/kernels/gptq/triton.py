"""round_columns in Triton: a program keeps the errors of its weights in registers, all columns of the block at once.

A kind of number is three: the exponent of the least binade, which those below it share, the bits of a mantissa, and the
largest number. Within a binade numbers lie 2^(exponent - bits) apart, and adding and subtracting 1.5 * 2^23 of these
distances rounds to them, ties to even. (int8's are 1 apart everywhere.)
"""

# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = {"mxfp4": (0, 1, 6.0), "int8": (7, 7, 127.0), "fp8": (-6, 3, 448.0)}
ROWS, WARPS = 4, 1  # of a program; 128 x 4096 weights on an H100 88 us, by 2 rows 89, by 8 103, by 16 in 4 warps 229


@triton.jit
def nearest(x, LEAST: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr):
    bits = tl.clamp(x, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    exponent = tl.maximum(size >> 23, 127 + LEAST)
    magic = (((exponent - BITS + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (size.to(tl.float32, bitcast=True) + magic) - magic
    return (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _round_columns_kernel(
    targets_ptr, columns_ptr, steps_ptr, factor_ptr, rounded_ptr, errors_ptr, weights, pitch,
    LEAST: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < weights
    column = tl.arange(0, COLUMNS)
    errors = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(COUNT):
        at = row + k * weights
        factor = tl.load(factor_ptr + k * pitch + column, mask=column < k, other=0.0)
        target = tl.load(targets_ptr + at, mask=inside, other=0.0)
        step = tl.load(steps_ptr + at, mask=inside, other=1.0)
        target += tl.sum(errors * factor[None, :], 1)
        rounded = nearest(tl.math.div_rn(target, step), LEAST, BITS, MOST)
        error = tl.load(columns_ptr + at, mask=inside, other=0.0) - rounded * step
        tl.store(rounded_ptr + at, rounded, mask=inside)
        tl.store(errors_ptr + at, error, mask=inside)
        errors = tl.where(column[None, :] == k, error[:, None], errors)


def round_columns(
    targets: Tensor, columns: Tensor, steps: Tensor, factor: Tensor, kind: str, rows: int = ROWS, warps: int = WARPS
) -> tuple[Tensor, Tensor]:
    """Checked by the caller. rows, warps: of a program, to measure others."""
    targets, columns, steps = (t.contiguous() for t in (targets, columns, steps))
    factor = factor if factor.stride(1) == 1 else factor.contiguous()
    rounded, errors = torch.empty_like(targets), torch.empty_like(targets)
    count, weights = targets.shape
    if targets.numel():
        least, bits, most = NUMBERS[kind]
        _round_columns_kernel[(triton.cdiv(weights, rows),)](
            targets, columns, steps, factor, rounded, errors, weights, factor.stride(0), LEAST=least, BITS=bits,
            MOST=most, COUNT=count, COLUMNS=triton.next_power_of_2(count), ROWS=rows, num_warps=warps,
        )  # fmt: skip
    return rounded, errors
