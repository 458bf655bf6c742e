"""Integers in groups as two int4 matrices each: a product for a few bfloat16 tokens on a CPU.

    has_halves    whether there is one for such a matrix here
    halve         codes int8 [N, K], steps float32 [N, K/group] -> what the product reads
    halves_gemm   x bfloat16 [..., K], what `halve` gave -> [..., N], rounded once from float32 sums

PyTorch has a fast CPU product by int4 weights with a scale and an offset a group, and none by MXFP4's weights (twice an
e2m1 value is an integer up to 12) or by int8's in groups. But an int8 code is 16 a + b, a in -8..7 and b in 0..15, so
that x W^T is a product of x beside x, by the matrix of all a beside that of all b. All its operands are exact. It reads
1.03 (groups of 256) to 1.25 bytes a weight (of 32), where bfloat16's has 2: one token takes 0.39 to 0.45 of the time of
bfloat16's product in oneDNN, four 0.64 to 0.79, five 1.06 to 1.5 (4096 x 4096 to 576 x 1536, two cores with AVX-512, a
scratch script).
"""

import torch
from torch import Tensor

FEW = 4  # tokens that are faster so than by a bfloat16 weight; PyTorch's kernel takes four at once
FEW_ALONE = 32  # where the weight would be dequantized for them first
GROUPS = (256, 128, 64, 32)  # the kernel's
ROWS = 16  # of which it takes multiples
CAPABILITY = "AVX512"  # by AVX2 one token takes 2.8 times as long as by a bfloat16 weight, by a plain loop 25 times
LARGEST_STEP = 2.0**100  # beyond, the sums of all a and of all b may overflow where theirs does not
CHUNK = 256  # rows that are widened at once: what they take stays in a cache; a multiple of the kernel's order's 64


def has_halves(rows: int, columns: int, group: int) -> bool:
    """Whether halves_gemm is fast on this machine for codes [rows, columns] in groups along the columns."""
    fast = torch.backends.cpu.get_cpu_capability() == CAPABILITY
    return fast and rows % ROWS == 0 and _kernel_group(columns, group) > 0


def halves_bytes(rows: int, columns: int, group: int) -> int:
    """What `halve` returns takes."""
    return rows * columns + 8 * rows * columns // _kernel_group(columns, group)


def halve(codes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor] | None:
    """codes int8 [N, K] by steps float32 [N, G] -> (uint8 [N, K], bfloat16 [2 K / group, N, 2]) in the kernel's order.

    None where a step, or 16 of it, is no bfloat16 number, or is so large that sums might overflow.
    """
    rows, columns = codes.shape
    group = _kernel_group(columns, columns // steps.shape[1])
    wide = steps.T.repeat_interleave(columns // steps.shape[1] // group, 0)
    # A scale and an offset, for the kernel's nibbles are -8 to 7.
    exact = torch.zeros(2, *wide.shape, 2, dtype=torch.float32)
    exact[0, ..., 0], exact[1, ..., 0], exact[1, ..., 1] = 16 * wide, wide, 8 * wide
    scales = exact.bfloat16()
    if not ((exact.abs() <= LARGEST_STEP).all() and torch.equal(scales.float(), exact)):
        return None
    packed = torch.empty(rows, columns, dtype=torch.uint8)
    for start in range(0, rows, CHUNK):
        part = codes[start : start + CHUNK].int()
        nibbles = torch.cat([(part >> 4).add_(8), part & 15], 1)
        packed[start : start + CHUNK] = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    return packed, scales.flatten(0, 1)


def halves_gemm(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x bfloat16 [..., K] by the transpose of what was halved: bfloat16 [..., N]. It has no derivative; of an infinity
    in x it makes more NaN than a product by the weight."""
    tokens = x.reshape(-1, x.shape[-1])
    group = 2 * x.shape[-1] // len(scales)
    y = torch._weight_int4pack_mm_for_cpu(torch.cat([tokens, tokens], -1), packed, group, scales)
    return y.view(*x.shape[:-1], len(packed))


def _kernel_group(columns: int, group: int) -> int:
    """The widest of the kernel's groups that lies in one of these, or 0."""
    return next((g for g in GROUPS if group % g == 0 and columns % g == 0), 0)
