"""FP8 quantization in Triton: every element is read once and written once, codes and scales bit-equal to the reference.

Three of a GPU's habits would break that equality, and each has its answer here:

- Division is approximate, or slow. x / scale takes four operations: the reciprocal of the scale is rounded correctly
  once a block, and one Newton step on the quotient with exact remainder then rounds every quotient correctly
  (Markstein 1990), as long as nothing underflows: a scale under 2^-60 is lifted by 2^64, and its elements with it.
- max() drops NaN. Magnitudes are compared as integers, which order like the floats and put NaN above infinity.
- The sign of zero gets lost in remainders. The quotient is kept as -(x * -1 / scale), whose zero terms have one sign.

The conversion to e4m3 is the hardware's, which saturates and makes every NaN 0x7F. NATIVE=False makes the same codes
from integer operations, for the interpreter, whose own conversion rounds ties the wrong way.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.fp8.tuned import BlockPlan, RowPlan, block_plan, row_plan, up

NATIVE = os.environ.get("TRITON_INTERPRET") != "1"
MOST_IN_REGISTERS = 16384  # elements of a scaled row that one program keeps
PARTIAL_TILE = 8192  # elements a program takes at a time to find a tensor's largest
MOST_PARTIALS = 1024
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# --- What all kernels share ------------------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """|x| as int32, ordered like the magnitudes, NaN above infinity."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def magnitude(bits, dtype: tl.constexpr):
    """The float32 value of magnitude_bits of a tensor of `dtype`."""
    if dtype == tl.bfloat16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def scale_of(amax, RULE: tl.constexpr):
    """The scale of blocks with this largest magnitude, float32."""
    scale = tl.where(amax == 0.0, 1.0, tl.math.div_rn(amax, 448.0))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    bits = scale.to(tl.int32, bitcast=True)
    finite = bits < 0x7F800000
    if RULE == "bf16":
        bits = tl.where(finite, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, bits)
    elif RULE == "pow2":
        bits = tl.where(finite, (bits + 0x7FFFFF) & -8388608, bits)
    bits = tl.where(bits > 0x7F800000, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, scale, RULE: tl.constexpr):
    """x / scale, float32, correctly rounded where its code is not zero; NaN where the scale is not finite."""
    wrong = scale.to(tl.int32, bitcast=True) >= 0x7F800000
    if RULE == "pow2":
        result = x * tl.where(wrong, float("nan"), tl.math.div_rn(1.0, tl.where(wrong, 1.0, scale)))
    else:
        lift = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
        lifted = scale * lift
        negative = tl.where(wrong, float("nan"), tl.math.div_rn(-1.0, tl.where(wrong, 1.0, lifted)))
        minus = x * (0.0 - lift)
        near = minus * negative
        rest = tl.math.fma(near, tl.where(wrong, 1.0, lifted), minus)
        result = tl.math.fma(rest, negative, near)
    return result


@triton.jit
def codes(x, scale, RULE: tl.constexpr, NATIVE: tl.constexpr):
    """x / scale as e4m3, x of any dtype and the scale broadcast to it; NaN where the scale is not finite."""
    if x.dtype == tl.bfloat16:  # by its bits: the interpreter's conversion loses subnormals
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    value = quotient(wide, scale, RULE)
    if NATIVE:
        code = value.to(tl.float8e4nv)
    else:
        code = _e4m3(value).to(tl.float8e4nv, bitcast=True)
    return code


@triton.jit
def _e4m3(v):
    """float32 -> the bits of e4m3, to nearest even, saturating, NaN as 0x7F; by integers and one rounding addition."""
    bits = v.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.where(v != v, 0.0, tl.abs(v)), 448.0)
    binade = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) << 23, 121 << 23).to(tl.float32, bitcast=True)
    magic = binade * 1572864.0  # 1.5 * 2^23 steps of 2^-3 binades: adding it rounds to a multiple of the step
    size = (size + magic) - magic
    normal = (size.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    code = tl.where(v != v, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


# --- Quantize --------------------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    x_ptr, q_ptr, scale_ptr, partial_ptr, rows, columns, x_stride, scale_row, scale_column,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """1 x GROUP blocks, ROWS x GROUPS of them a program. PARTIALS: that many magnitudes make one scale for all."""
    across = tl.cdiv(columns, GROUPS * GROUP)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    if PARTIALS:
        largest = tl.max(tl.load(partial_ptr + tl.arange(0, PARTIALS)), 0)
        scale = scale_of(magnitude(largest, x.dtype), RULE)
        q = codes(x, scale, RULE, NATIVE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    else:
        groups = tl.reshape(x, (ROWS, GROUPS, GROUP))
        scale = scale_of(magnitude(tl.max(magnitude_bits(groups), 2), x.dtype), RULE)
        q = tl.reshape(codes(groups, scale[:, :, None], RULE, NATIVE), (ROWS, GROUPS * GROUP))
        group = tl.program_id(0) % across * GROUPS + tl.arange(0, GROUPS)[None, :]
        inside = (row < rows) & (group * GROUP < columns)
        tl.store(scale_ptr + row * scale_row + group * scale_column, scale, mask=inside)
    tl.store(q_ptr + row * columns + column, q, mask=mask)


@triton.jit
def _block_kernel(
    x_ptr, q_ptr, scale_ptr, rows, columns, x_stride, scale_row, scale_column, block_rows, block_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr, KEEP: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """One block of any shape a program, in pieces of ROWS x COLUMNS. KEEP: one piece, which stays in registers; else
    the pieces are read for their magnitude and again, from L1 or L2, for their codes."""
    across = tl.cdiv(columns, block_columns)
    block_row, block_column = tl.program_id(0) // across, tl.program_id(0) % across
    top, left = block_row.to(tl.int64) * block_rows, block_column * block_columns
    bottom, right = tl.minimum(top + block_rows, rows), left + block_columns
    row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    scale_at = scale_ptr + block_row.to(tl.int64) * scale_row + block_column * scale_column
    if KEEP:
        mask = (row < bottom) & (column < columns) & (column < right)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
        scale = scale_of(magnitude(tl.max(magnitude_bits(x)), x.dtype), RULE)
        tl.store(scale_at, scale)
        tl.store(q_ptr + row * columns + column, codes(x, scale, RULE, NATIVE), mask=mask)
    else:
        wide = tl.cdiv(block_columns, COLUMNS)
        pieces = tl.cdiv(block_rows, ROWS) * wide
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for piece in tl.range(0, pieces, loop_unroll_factor=UNROLL):
            r, c = row + piece // wide * ROWS, column + piece % wide * COLUMNS
            mask = (r < bottom) & (c < columns) & (c < right)
            largest = tl.maximum(largest, magnitude_bits(tl.load(x_ptr + r * x_stride + c, mask=mask, other=0.0)))
        scale = scale_of(magnitude(tl.max(largest), x_ptr.dtype.element_ty), RULE)
        tl.store(scale_at, scale)
        for piece in tl.range(0, pieces, loop_unroll_factor=UNROLL):
            r, c = row + piece // wide * ROWS, column + piece % wide * COLUMNS
            mask = (r < bottom) & (c < columns) & (c < right)
            x = tl.load(x_ptr + r * x_stride + c, mask=mask, other=0.0)
            tl.store(q_ptr + r * columns + c, codes(x, scale, RULE, NATIVE), mask=mask)


# A 256 x 256 block of 16-bit values is 128 KB, half of a multiprocessor's registers, and fits only packed: two values
# a word. The compiler unpacks early (before the scale is known) and a whole tensor at a time; words, four separate
# pieces, and a dependence of each piece on the scale hold it back: 64 registers and no spill with 1024 threads, where
# the plain kernel spills 320 bytes.


@triton.jit
def _words(x_ptr, row, column, rows, columns, x_stride, EVEN: tl.constexpr):
    if EVEN:
        words = tl.load(x_ptr + row * x_stride + column)
    else:
        words = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & (column < columns), other=0)
    return words


@triton.jit
def _words_bits(words):
    """magnitude_bits of the larger of a word's two elements."""
    return tl.maximum((words & 0x7FFF0000) >> 16, words & 0x7FFF)


@triton.jit
def _half(words, HIGH: tl.constexpr, dtype: tl.constexpr):
    """float32 of the low or the high element of a word."""
    if dtype == tl.bfloat16:
        if HIGH:
            value = (words & -65536).to(tl.float32, bitcast=True)
        else:
            value = (words << 16).to(tl.float32, bitcast=True)
    else:
        if HIGH:
            words = words >> 16
        value = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _pair(low, high, NATIVE: tl.constexpr):
    """The codes of two float32 tensors as int16, `low` in the low byte."""
    if NATIVE:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], tl.int16, is_pure=True, pack=1
        )
    else:
        pair = _e4m3(low).to(tl.int16) | (_e4m3(high).to(tl.int16) << 8)
    return pair


@triton.jit
def _put_words(
    q_ptr, words, scale, row, column, rows, columns, RULE: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    words ^= scale.to(tl.int32, bitcast=True) >> 31  # 0, which the compiler does not know
    low, high = quotient(_half(words, False, DTYPE), scale, RULE), quotient(_half(words, True, DTYPE), scale, RULE)
    if EVEN:
        tl.store(q_ptr + row * columns + column, _pair(low, high, NATIVE))
    else:
        tl.store(q_ptr + row * columns + column, _pair(low, high, NATIVE), mask=(row < rows) & (column < columns))


@triton.jit
def _word_kernel(
    x_ptr, q_ptr, scale_ptr, rows, columns, x_stride, scale_row, scale_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One block of 4 ROWS x COLUMNS words a program, each element of which is read once. Columns are in words."""
    across = tl.cdiv(columns, COLUMNS)
    block_row, block_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = block_row.to(tl.int64) * (4 * ROWS) + tl.arange(0, ROWS)[:, None]
    column = block_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    w0 = _words(x_ptr, row, column, rows, columns, x_stride, EVEN)
    w1 = _words(x_ptr, row + ROWS, column, rows, columns, x_stride, EVEN)
    w2 = _words(x_ptr, row + 2 * ROWS, column, rows, columns, x_stride, EVEN)
    w3 = _words(x_ptr, row + 3 * ROWS, column, rows, columns, x_stride, EVEN)
    upper, lower = tl.maximum(_words_bits(w0), _words_bits(w1)), tl.maximum(_words_bits(w2), _words_bits(w3))
    scale = scale_of(magnitude(tl.max(tl.maximum(upper, lower)), DTYPE), RULE)
    tl.store(scale_ptr + block_row.to(tl.int64) * scale_row + block_column * scale_column, scale)
    _put_words(q_ptr, w0, scale, row, column, rows, columns, RULE, NATIVE, EVEN, DTYPE)
    _put_words(q_ptr, w1, scale, row + ROWS, column, rows, columns, RULE, NATIVE, EVEN, DTYPE)
    _put_words(q_ptr, w2, scale, row + 2 * ROWS, column, rows, columns, RULE, NATIVE, EVEN, DTYPE)
    _put_words(q_ptr, w3, scale, row + 3 * ROWS, column, rows, columns, RULE, NATIVE, EVEN, DTYPE)


@triton.jit
def _largest_kernel(
    x_ptr, partial_ptr, rows, columns, x_stride, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The largest magnitude of every PROGRAMS-th tile."""
    across = tl.cdiv(columns, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(x_ptr + row * x_stride + column, mask=(row < rows) & (column < columns), other=0.0)
        largest = tl.maximum(largest, magnitude_bits(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(largest))


def quantize(x: Tensor, q: Tensor, scale: Tensor, block: tuple[int, int], rule: str) -> None:
    """x [M, K], contiguous columns, not empty -> q [M, K] contiguous and scale, in blocks without zeros."""
    rows, columns = x.shape
    if block[0] >= rows and block[1] >= columns and rows * columns > MOST_IN_REGISTERS:
        _quantize_tensor(x, q, scale, rule)
        return
    height, width = min(block[0], rows), min(block[1], columns)
    padded = up(width)
    if height == 1 and padded <= MOST_IN_REGISTERS and (width == columns or width == padded):
        run_rows(x, q, scale, padded, rule, row_plan(padded, rows, columns))
    else:
        run_blocks(x, q, scale, (height, width), rule, block_plan(up(height), padded, x.dtype.itemsize))


def run_rows(x: Tensor, q: Tensor, scale: Tensor, group: int, rule: str, plan: RowPlan) -> None:
    """1 x group blocks, a power of two; what is past the last column counts as zero."""
    rows, columns = x.shape
    grid = triton.cdiv(rows, plan.rows) * triton.cdiv(columns, plan.groups * group)
    _rows_kernel[(grid,)](
        x, q, scale, scale, rows, columns, x.stride(0), *scale.stride(), plan.rows, plan.groups, group, rule, NATIVE, 0,
        num_warps=plan.warps,
    )  # fmt: skip


def run_blocks(x: Tensor, q: Tensor, scale: Tensor, block: tuple[int, int], rule: str, plan: BlockPlan) -> None:
    """Blocks of any shape, a program each."""
    rows, columns = x.shape
    if plan.kind == "words" and _has_words(x) and _is_padding((4 * plan.rows, plan.columns), block, x.shape):
        even = rows % (4 * plan.rows) == 0 and columns % plan.columns == 0
        _word_kernel[(scale.numel(),)](
            x.view(torch.int32), q.view(torch.int16), scale, rows, columns // 2, x.stride(0) // 2, *scale.stride(),
            plan.rows, plan.columns // 2, rule, NATIVE, even, DTYPES[x.dtype], num_warps=plan.warps,
        )  # fmt: skip
        return
    keep = plan.kind == "keep"
    assert not keep or (plan.rows >= block[0] and plan.columns >= block[1]), (plan, block)
    _block_kernel[(scale.numel(),)](
        x, q, scale, rows, columns, x.stride(0), *scale.stride(), *block, plan.rows, plan.columns, rule, NATIVE, keep,
        plan.unroll, num_warps=plan.warps,
    )  # fmt: skip


def _has_words(x: Tensor) -> bool:
    """Whether a row of 16-bit values is a row of 32-bit words."""
    return x.dtype.itemsize == 2 and not (x.shape[1] % 2 or x.stride(0) % 2 or x.storage_offset() % 2)


def _is_padding(padded: tuple[int, int], block: tuple[int, int], shape: torch.Size) -> bool:
    """Whether blocks of the padded size are those blocks: equal, or past the matrix's only one."""
    return all(p == b or p >= size for p, b, size in zip(padded, block, shape, strict=True))


def _quantize_tensor(x: Tensor, q: Tensor, scale: Tensor, rule: str) -> None:
    """One scale for all: the largest of parts, then the codes. Two launches, each of which reads x."""
    rows, columns = x.shape
    wide = min(up(columns), 1024)
    tall = PARTIAL_TILE // wide
    tiles = triton.cdiv(rows, tall) * triton.cdiv(columns, wide)
    programs = min(MOST_PARTIALS, up(tiles))
    partial = torch.zeros(programs, dtype=torch.int32, device=x.device)
    _largest_kernel[(programs,)](x, partial, rows, columns, x.stride(0), tiles, tall, wide, num_warps=8)
    plan = row_plan(128, rows, columns)
    grid = triton.cdiv(rows, plan.rows) * triton.cdiv(columns, plan.groups * 128)
    _rows_kernel[(grid,)](
        x, q, scale, partial, rows, columns, x.stride(0), *scale.stride(), plan.rows, plan.groups, 128, rule, NATIVE,
        programs, num_warps=plan.warps,
    )  # fmt: skip


# --- Both ways -------------------------------------------------------------------------------------------------------


@triton.jit
def _both_ways_kernel(
    x_ptr, q_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows, columns, padded, x_stride, scale_row, scale_column,
    turned_scale_row, turned_scale_column, SIZE: tl.constexpr, SQUARE: tl.constexpr, RULE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """SIZE x SIZE elements a program, read once. SQUARE: they are one block, and its codes turn with it."""
    across = tl.cdiv(columns, SIZE)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    i = tl.arange(0, SIZE)
    row, column = tile_row.to(tl.int64) * SIZE + i, tile_column * SIZE + i
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    bits = magnitude_bits(x)
    q_at = q_ptr + row[:, None] * columns + column[None, :]
    turned_at = turned_ptr + column[:, None].to(tl.int64) * padded + row[None, :]
    if SQUARE:
        scale = scale_of(magnitude(tl.max(bits), x.dtype), RULE)
        tl.store(scale_ptr + tile_row.to(tl.int64) * scale_row + tile_column * scale_column, scale)
        tl.store(turned_scale_ptr + tile_column.to(tl.int64) * turned_scale_row + tile_row * turned_scale_column, scale)
        q = codes(x, scale, RULE, NATIVE)
        tl.store(q_at, q, mask=mask)
        tl.store(turned_at, tl.trans(q), mask=(column < columns)[:, None])
    else:
        scale = scale_of(magnitude(tl.max(bits, 1), x.dtype), RULE)
        tl.store(scale_ptr + row * scale_row + tile_column * scale_column, scale, mask=row < rows)
        tl.store(q_at, codes(x, scale[:, None], RULE, NATIVE), mask=mask)
        turned = scale_of(magnitude(tl.max(bits, 0), x.dtype), RULE)
        at = column.to(tl.int64) * turned_scale_row + tile_row * turned_scale_column
        tl.store(turned_scale_ptr + at, turned, mask=column < columns)
        q = codes(x, turned[None, :], RULE, NATIVE)
        tl.store(turned_at, tl.trans(q), mask=(column < columns)[:, None])


@triton.jit
def _turn_kernel(q_ptr, turned_ptr, rows, columns, padded, SIZE: tl.constexpr):
    """The transpose of bytes, SIZE x SIZE a program, and zeros up to `padded`."""
    across = tl.cdiv(columns, SIZE)
    row = (tl.program_id(0) // across).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(0) % across * SIZE + tl.arange(0, SIZE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    q = tl.load(q_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0)
    turned_at = turned_ptr + column[:, None].to(tl.int64) * padded + row[None, :]
    tl.store(turned_at, tl.trans(q), mask=(column < columns)[:, None])


def quantize_both_ways(
    x: Tensor, q: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, square: bool, rule: str
) -> None:
    """x [M, K] -> q [M, K] in 1 x 128 or 128 x 128 blocks and, the same of the transpose, turned [K, M to 128s]."""
    rows, columns = x.shape
    tiles = triton.cdiv(rows, 128) * triton.cdiv(columns, 128)
    if square and x.dtype.itemsize == 4:  # Triton 3.6 turns these codes wrongly on Hopper: another kernel turns them
        quantize(x, q, scale, (128, 128), rule)
        sizes = rows, columns, turned.shape[1]
        _turn_kernel[(tiles,)](q.view(torch.uint8), turned.view(torch.uint8), *sizes, 128, num_warps=8)
        turned_scale.copy_(scale.T)
        return
    _both_ways_kernel[(tiles,)](
        x, q, scale, turned, turned_scale, rows, columns, turned.shape[1], x.stride(0), *scale.stride(),
        *turned_scale.stride(), 128, square, rule, NATIVE, num_warps=16,
    )  # fmt: skip
