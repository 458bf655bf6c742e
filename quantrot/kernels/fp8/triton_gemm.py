"""The product of two block-scaled e4m3 matrices in Triton.

Hopper's tensor cores add FP8 products with about 14 bits. Every 128 of K therefore go to fresh accumulators, which are
scaled and added to float32 ones by a fused multiply-add: `sum += product * (a_scale * b_scale)`, K ascending. The
order is the same in every plan, and so are a row's bits, whatever M is and whichever tile the row falls into. Only
split K (`splits`, backend "triton_splitk") adds parts of K separately: deterministic, but other bits.

Up to 64 rows the operands change places: the weight's rows are the tensor core's rows, of which it wants 64, and the
tokens are its columns, of which 8 are enough.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from quantrot.kernels.fp8.tuned import GemmPlan, gemm_plan
from quantrot.kernels.nvrtc import processors

NEEDS = "scaled blocks whose columns are a multiple of 128 or all of K"
STEP = 128  # of K, between promotions


@triton.jit
def _operand(source, first, rows, step, k, stride, SIZE: tl.constexpr, TMA: tl.constexpr):
    """[SIZE, 128] of a matrix [rows, k], zeros outside."""
    if TMA:
        tile = source.load([first, step * 128])
    else:
        row, column = first + tl.arange(0, SIZE)[:, None], step * 128 + tl.arange(0, 128)[None, :]
        tile = tl.load(source + row.to(tl.int64) * stride + column, mask=(row < rows) & (column < k), other=0.0)
    return tile


@triton.jit
def _scale(
    scale_ptr, first, rows, step, scale_row, scale_k, SIZE: tl.constexpr, HEIGHT: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """What scales a tile's rows at a step: one number where a block holds them all, else [SIZE]."""
    at = scale_ptr
    if SPAN:
        at += step // SPAN * scale_k
    if HEIGHT % SIZE == 0:
        scale = tl.load(at + first // HEIGHT * scale_row)
    else:
        row = first + tl.arange(0, SIZE)
        scale = tl.load(at + row // HEIGHT * scale_row, mask=row < rows, other=0.0)
    return scale


@triton.jit
def _spread(a_scale, b_scale, A_ONE: tl.constexpr, B_ONE: tl.constexpr, SWAP: tl.constexpr):
    """(a_scale, b_scale), each to broadcast over the sums."""
    left = a_scale
    right = b_scale
    if not A_ONE:
        left = a_scale[None, :] if SWAP else a_scale[:, None]
    if not B_ONE:
        right = b_scale[:, None] if SWAP else b_scale[None, :]
    return left, right


@triton.jit
def _tile(
    a, b, out_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, k, a_stride, b_stride, out_stride,
    a_scale_row, a_scale_k, b_scale_row, b_scale_k, tile_m, tile_n, first_step, last_step,
    BM: tl.constexpr, BN: tl.constexpr, A_HEIGHT: tl.constexpr, A_SPAN: tl.constexpr, B_HEIGHT: tl.constexpr,
    B_SPAN: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One output tile over the steps of K from first_step to last_step."""
    A_ONE: tl.constexpr = A_HEIGHT % BM == 0
    B_ONE: tl.constexpr = B_HEIGHT % BN == 0
    AT_END: tl.constexpr = A_SPAN == 0 and B_SPAN == 0
    TWO_STEPS: tl.constexpr = A_HEIGHT < 16 and B_HEIGHT < 16  # their product would be another tile of registers
    m0, n0 = tile_m * BM, tile_n * BN
    if SWAP:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    a_scale = _scale(a_scale_ptr, m0, m, first_step, a_scale_row, a_scale_k, BM, A_HEIGHT, A_SPAN)
    b_scale = _scale(b_scale_ptr, n0, n, first_step, b_scale_row, b_scale_k, BN, B_HEIGHT, B_SPAN)
    for step in tl.range(first_step, last_step):
        x = _operand(a, m0, m, step, k, a_stride, BM, TMA)
        w = _operand(b, n0, n, step, k, b_stride, BN, TMA)
        if SWAP:
            product = tl.dot(w, x.T)
        else:
            product = tl.dot(x, w.T)
        if AT_END:
            total += product
        else:
            left, right = _spread(a_scale, b_scale, A_ONE, B_ONE, SWAP)
            following = tl.minimum(step + 1, last_step - 1)  # the next scales come while the tensor cores work
            a_scale = _scale(a_scale_ptr, m0, m, following, a_scale_row, a_scale_k, BM, A_HEIGHT, A_SPAN)
            b_scale = _scale(b_scale_ptr, n0, n, following, b_scale_row, b_scale_k, BN, B_HEIGHT, B_SPAN)
            if TWO_STEPS:
                total = tl.math.fma(product * left, right, total)
            else:
                total = tl.math.fma(product, left * right, total)
    if SWAP:
        row, column = m0 + tl.arange(0, BM)[None, :], n0 + tl.arange(0, BN)[:, None]
    else:
        row, column = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    if AT_END:
        left, right = _spread(a_scale, b_scale, A_ONE, B_ONE, SWAP)
        if BIAS:  # spelled out: the compiler may fuse or not
            total = tl.math.fma(total * left, right, bias)
        else:
            total = total * left * right
    elif BIAS:
        total += bias
    out = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < m) & (column < n))


@triton.jit
def _gemm_kernel(
    a, b, out_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, k, a_stride, b_stride, out_stride, out_split,
    a_scale_row, a_scale_k, b_scale_row, b_scale_k,
    BM: tl.constexpr, BN: tl.constexpr, A_HEIGHT: tl.constexpr, A_SPAN: tl.constexpr, B_HEIGHT: tl.constexpr,
    B_SPAN: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of GROUP rows of tiles, which share b in L2. SPLITS > 1: part s of K goes to out_ptr[s]."""
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    tiles = down * across
    steps = tl.cdiv(k, 128)
    a_split = tl.cdiv(steps, SPLITS)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            group = tile // (GROUP * across)
            height = tl.minimum(down - group * GROUP, GROUP)
            inside = tile % (GROUP * across)
            _tile(
                a, b, out_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, k, a_stride, b_stride, out_stride,
                a_scale_row, a_scale_k, b_scale_row, b_scale_k, group * GROUP + inside % height, inside // height,
                0, steps, BM, BN, A_HEIGHT, A_SPAN, B_HEIGHT, B_SPAN, BIAS, SWAP, TMA,
            )  # fmt: skip
    else:
        split, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        group = tile // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        inside = tile % (GROUP * across)
        _tile(
            a, b, out_ptr + split.to(tl.int64) * out_split, bias_ptr, a_scale_ptr, b_scale_ptr, m, n, k, a_stride,
            b_stride, out_stride, a_scale_row, a_scale_k, b_scale_row, b_scale_k, group * GROUP + inside % height,
            inside // height, split * a_split, tl.minimum(steps, (split + 1) * a_split), BM, BN, A_HEIGHT, A_SPAN,
            B_HEIGHT, B_SPAN, BIAS, SWAP, TMA,
        )  # fmt: skip


@triton.jit
def _sum_kernel(part_ptr, out_ptr, bias_ptr, size, n, SPLITS: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """The parts of K in their order, the bias, one rounding."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(part_ptr + i, mask=i < size, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + split * size.to(tl.int64) + i, mask=i < size, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + i % n, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < size)


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> bool:
    """Whether `gemm` takes this product."""
    k = a.shape[1]
    return all(block[1] == 0 or block[1] >= k or block[1] % STEP == 0 for block in (a_block, b_block))


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """[M, N] in out_dtype; none of M, N, K is 0."""
    both_rows = a_block[0] == b_block[0] == 1 and 0 < min(a_block[1], b_block[1]) < a.shape[1]
    plan = gemm_plan(a.shape[0], b.shape[0], a.shape[1], both_rows)
    return run(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, plan)


def run(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    plan: GemmPlan,
) -> Tensor:
    """The product by this plan."""
    k = a.shape[1]
    a, b = _aligned(a), _aligned(b)
    (m, padded), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    parts = out if plan.splits == 1 else torch.empty(plan.splits, m, n, dtype=torch.float32, device=a.device)
    tma = plan.tma and _has_tma(a.device)
    left = TensorDescriptor.from_tensor(a, [plan.bm, STEP]) if tma else a
    right = TensorDescriptor.from_tensor(b, [plan.bn, STEP]) if tma else b
    tiles = triton.cdiv(m, plan.bm) * triton.cdiv(n, plan.bn) * plan.splits
    grid = min(tiles, plan.persistent * processors(a.get_device())) if plan.persistent else tiles
    _gemm_kernel[(grid,)](
        left, right, parts, out if bias is None else bias, a_scale, b_scale, m, n, padded, a.stride(0), b.stride(0), n,
        m * n, *a_scale.stride(), *b_scale.stride(), plan.bm, plan.bn, *_height_span(a_block, m, k),
        *_height_span(b_block, n, k), bias is not None and plan.splits == 1, plan.swap, tma, plan.group, plan.splits,
        plan.persistent > 0, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.splits > 1:
        _sum_kernel[(triton.cdiv(m * n, 1024),)](
            parts, out, out if bias is None else bias, m * n, n, plan.splits, bias is not None, 1024
        )  # fmt: skip
    return out


def _height_span(block: tuple[int, int], rows: int, k: int) -> tuple[int, int]:
    """Rows and steps of K that share a scale: for all rows a height that every tile divides, for all of K 0."""
    height = 1 << 30 if block[0] == 0 or block[0] >= rows > 1 else block[0]
    return height, 0 if block[1] == 0 or block[1] >= k else block[1] // STEP


def _aligned(x: Tensor) -> Tensor:
    """x with 16-byte aligned rows; a copy, padded with zero columns, only where x has others."""
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return F.pad(x.view(torch.uint8), (0, -x.shape[1] % 16)).contiguous().clone().view(x.dtype)


@lru_cache(maxsize=16)
def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
