"""Products with packed MXFP4 weights in Triton: a few tokens, and the rows that e4m3's window does not hold.

decode reads a weight's bytes once: a program owns ROWS rows of the weight and a slice of its columns, decodes the codes
in registers, and multiplies them on the tensor cores with the tokens as the narrow side. Slices of columns are partial
sums in float32, added in their order by a second kernel, so a result does not depend on the order of the programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.mxfp4.reference import GROUP
from quantrot.kernels.nvrtc import processors

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True)
class Plan:
    """How `decode` runs one shape: rows of the weight and columns a step, slices of the columns, warps, stages."""

    rows: int
    columns: int
    slices: int
    warps: int
    stages: int


@triton.jit
def _decode_kernel(
    x_ptr, packed_ptr, scale_ptr, token_scale_ptr, out_ptr, tokens, rows, columns, slice_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    start = tl.program_id(1) * slice_columns
    end = tl.minimum(start + slice_columns, columns)
    here = row[:, None].to(tl.int64)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for k in tl.range(start, end, COLUMNS, num_stages=STAGES):
        byte = k // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        inside = (row[:, None] < rows) & (byte < end // 2)
        w = tl.load(packed_ptr + here * (columns // 2) + byte, mask=inside, other=0)
        group = k // _GROUP + tl.arange(0, COLUMNS // _GROUP)[None, :]
        inside = (row[:, None] < rows) & (group < end // _GROUP)
        scale = tl.load(scale_ptr + here * (columns // _GROUP) + group, mask=inside, other=0)
        column = k + tl.arange(0, COLUMNS)[:, None]
        inside = (column < end) & (token[None, :] < tokens)
        x = tl.load(x_ptr + token[None, :] * columns + column, mask=inside, other=0.0)
        acc = tl.dot_scaled(w, scale, "e2m1", x, None, FORMAT, acc)
    if SCALED:
        acc *= tl.load(token_scale_ptr + token, mask=token < tokens, other=0.0)[None, :]
    at = token[None, :] * rows + row[:, None]
    inside = (row[:, None] < rows) & (token[None, :] < tokens)
    if PARTIAL:
        at += tl.program_id(1) * (tokens * rows)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_slices_kernel(
    partial_ptr, token_scale_ptr, out_ptr, rows, size, SLICES: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    acc = tl.load(partial_ptr + at, mask=at < size, other=0.0)
    for i in tl.static_range(1, SLICES):
        acc += tl.load(partial_ptr + at + i * size, mask=at < size, other=0.0)
    if SCALED:
        acc *= tl.load(token_scale_ptr + at // rows, mask=at < size, other=0.0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=at < size)


def plan_for(tokens: int, rows: int, columns: int) -> Plan:
    """Three programs for each of 132 multiprocessors, no slice under two steps."""
    step = 256 if tokens <= 16 else 128
    tall = 64 if rows >= 64 * 132 else 32
    programs = triton.cdiv(rows, tall)
    slices = max(1, min(8, 3 * 132 // programs, columns // (2 * step)))
    return Plan(tall, step, slices, 4 if tall == 64 else 2, 4)


def decode(
    tokens: Tensor,
    token_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    plan: Plan | None = None,
) -> Tensor:
    """tokens [M, K] by a packed weight [N, K/2]: [M, N] in dtype; M at most 32.

    tokens: bfloat16 (float16 runs too, where the weight's scales are numbers of it). token_scale: float32 [M] that
    multiplies each token's result, or None. Products are exact, sums float32.
    """
    tokens, packed, scale = tokens.contiguous(), packed.contiguous(), scale.contiguous()
    count, columns = tokens.shape
    rows = packed.shape[0]
    out = torch.empty(count, rows, dtype=dtype, device=tokens.device)
    if not out.numel():
        return out
    if not columns:
        return out.zero_()
    plan = plan or plan_for(count, rows, columns)
    step = plan.columns * triton.cdiv(triton.cdiv(columns, plan.slices), plan.columns)
    slices = triton.cdiv(columns, step)
    partial = out if slices == 1 else torch.empty(slices, count, rows, dtype=torch.float32, device=out.device)
    scales = scale if token_scale is None else token_scale
    _decode_kernel[(triton.cdiv(rows, plan.rows), slices)](
        tokens, packed, scale, scales, partial, count, rows, columns, step,
        TOKENS=max(16, triton.next_power_of_2(count)), ROWS=plan.rows, COLUMNS=plan.columns, PARTIAL=slices > 1,
        SCALED=token_scale is not None and slices == 1, STAGES=plan.stages,
        FORMAT="fp16" if tokens.dtype == torch.float16 else "bf16", num_warps=plan.warps,
    )  # fmt: skip
    if slices > 1:
        add_slices(partial, token_scale, out)
    return out


def add_slices(partial: Tensor, token_scale: Tensor | None, out: Tensor) -> None:
    """out [M, N] = token_scale times the sum of partial, float32 [slices, M, N], in the order of the slices."""
    size = out.numel()
    _add_slices_kernel[(triton.cdiv(size, 512),)](
        partial, partial if token_scale is None else token_scale, out, out.shape[1], size, SLICES=partial.shape[0],
        SCALED=token_scale is not None, TILE=512,
    )  # fmt: skip


# --- Rows outside the window -----------------------------------------------------------------------------------------


@triton.jit
def _largest(ptr, count, START: tl.constexpr, most):
    """most, and the numbers from START on."""
    TILE: tl.constexpr = most.shape[0]
    for start in tl.range(START, count, TILE):
        at = start + tl.arange(0, TILE)
        most = tl.maximum(most, tl.load(ptr + at, mask=at < count, other=0))
    return most


@triton.jit
def _any(a_ptr, rows, b_ptr, columns, A_PACKED: tl.constexpr, TILE: tl.constexpr):
    """Whether one of a's (if A_PACKED) or b's numbers is above zero; the first of both are asked for together."""
    at = tl.arange(0, TILE)
    most = tl.load(b_ptr + at, mask=at < columns, other=0)
    if A_PACKED:
        most = tl.maximum(most, tl.load(a_ptr + at, mask=at < rows, other=0))
        most = _largest(a_ptr, rows, TILE, most)
    return tl.max(_largest(b_ptr, columns, TILE, most), axis=0) > 0


@triton.jit
def _multiply_tile(
    y_ptr, a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, rows, columns, depth, row, column, store,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, A_PACKED: tl.constexpr,
):  # fmt: skip
    """y at `row`, `column`, from a packed or e4m3, and b packed, where `store` says so."""
    a_row, b_row = row[:, None].to(tl.int64), column[None, :].to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, depth, DEPTH, num_stages=1):
        byte = k // 2 + tl.arange(0, DEPTH // 2)
        group = k // _GROUP + tl.arange(0, DEPTH // _GROUP)
        inside = (byte[:, None] < depth // 2) & (column[None, :] < columns)
        b = tl.load(b_ptr + b_row * (depth // 2) + byte[:, None], mask=inside, other=0)
        inside = (group[None, :] < depth // _GROUP) & (column[:, None] < columns)
        at = column[:, None].to(tl.int64) * (depth // _GROUP) + group[None, :]
        b_scale = tl.load(b_scale_ptr + at, mask=inside, other=0)
        if A_PACKED:
            inside = (byte[None, :] < depth // 2) & (row[:, None] < rows)
            a = tl.load(a_ptr + a_row * (depth // 2) + byte[None, :], mask=inside, other=0)
            inside = (group[None, :] < depth // _GROUP) & (row[:, None] < rows)
            a_scale = tl.load(a_scale_ptr + a_row * (depth // _GROUP) + group[None, :], mask=inside, other=0)
            acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
        else:
            at = k + tl.arange(0, DEPTH)
            inside = (at[None, :] < depth) & (row[:, None] < rows)
            a = tl.load(a_ptr + a_row * depth + at[None, :], mask=inside, other=0.0).to(tl.bfloat16)
            acc = tl.dot_scaled(a, None, "bf16", b, b_scale, "e2m1", acc)
    if not A_PACKED:
        acc *= tl.load(a_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    store = store & (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(y_ptr + a_row * columns + b_row, acc.to(y_ptr.dtype.element_ty), mask=store)


@triton.jit
def _repair_kernel(
    y_ptr, a_ptr, a_scale_ptr, a_outside_ptr, b_ptr, b_scale_ptr, b_outside_ptr, wide_ptr, wide_scale_ptr,
    rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, A_PACKED: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if _any(a_outside_ptr, rows, b_outside_ptr, columns, A_PACKED, 4096):
        across = tl.cdiv(columns, COLUMNS)
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0), num_stages=1):
            row = tile // across * ROWS + tl.arange(0, ROWS)
            column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
            a_bad = tl.zeros((ROWS,), tl.int32)
            if A_PACKED:
                a_bad = tl.load(a_outside_ptr + row, mask=row < rows, other=0)
            b_bad = tl.load(b_outside_ptr + column, mask=column < columns, other=0)
            packed_bad = tl.max(a_bad, axis=0)
            packed = a_bad[:, None] + b_bad[None, :] * 0 > 0
            if WIDE:
                if tl.max(b_bad, axis=0) > 0:
                    _multiply_tile(
                        y_ptr, wide_ptr, wide_scale_ptr, b_ptr, b_scale_ptr, rows, columns, depth, row, column,
                        (b_bad[None, :] > 0) & (a_bad[:, None] == 0), ROWS, COLUMNS, DEPTH, False,
                    )  # fmt: skip
            else:
                packed_bad += tl.max(b_bad, axis=0)
                packed = a_bad[:, None] + b_bad[None, :] > 0
            if A_PACKED:
                if packed_bad > 0:
                    _multiply_tile(
                        y_ptr, a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, rows, columns, depth, row, column, packed,
                        ROWS, COLUMNS, DEPTH, True,
                    )  # fmt: skip


def repair(
    y: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_outside: Tensor,
    *,
    packed: tuple[Tensor, Tensor, Tensor] | None = None,
    wide: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Overwrite the rows and columns of y = a b^T [M, N] that have an operand outside e4m3's window.

    b: packed [N, K/2], with its scale, and int32 [N], above zero where it is outside. Of a, packed: the same; wide: its
    e4m3 [M, K] with a float32 scale a row. With both, rows that are outside are taken from the packed form, which need
    not hold others, and the columns' other rows from e4m3. One program a multiprocessor reads all the numbers, and
    leaves where they are zero; nothing is decided on the host, so this runs in CUDA graphs.
    """
    rows, columns = y.shape
    if y.numel():
        tile = 128 if rows > 32 else 32
        tiles = triton.cdiv(rows, tile) * triton.cdiv(columns, 128)
        overlap = y.device.type == "cuda" and torch.cuda.get_device_capability(y.device)[0] >= 9
        _repair_kernel[(min(tiles, processors(y.get_device())),)](
            y, *(packed or (y, y, y)), b, b_scale, b_outside, *(wide or (y, y)), rows, columns, 2 * b.shape[1],
            ROWS=tile, COLUMNS=128, DEPTH=64, A_PACKED=packed is not None, WIDE=wide is not None,
            OVERLAP=overlap, num_warps=8 if tile == 128 else 4, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
