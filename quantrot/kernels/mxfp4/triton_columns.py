"""MXFP4 of a transpose, in Triton: groups run along the rows of what is read.

A thread owns a column of a block of 32, 64 or 128 rows: element j of its tuple comes from row j, so neighbours in a
warp read neighbours in memory, and the transform and the packing stay in registers (see `triton`). A group's 16 bytes
go out in one store; programs that follow one another along the rows fill the rest of their sectors.
"""

# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.mxfp4 import triton_rows, tuned
from quantrot.kernels.mxfp4.reference import GROUP, Random, ScaleRule
from quantrot.kernels.mxfp4.triton import (
    EXACT,
    _fine,
    _kept,
    _key,
    _matrix4,
    _part,
    _quantize,
    _scale_value,
    _turn_across,
    _turned,
    _value,
    drawn_of,
    float_signs,
    key_of,
    kind_of,
    outputs,
)

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _store_group(
    part, packed_ptr, scale_ptr, mask_ptr, first_column, first_block, columns, blocks, root, key,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    RULE: tl.constexpr, DITHER: tl.constexpr, MASK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Quantize a tuple of [R, C] vectors, and store them as [C, R]: group GROUP of each block, every STEPth column."""
    column = first_column + tl.arange(0, COLUMNS)[None, :] * STEP
    block = first_block + tl.arange(0, ROWS)[:, None]
    number = column.to(tl.int64) * (blocks * GROUPS) + (block * GROUPS + GROUP)
    part = _turned(part, RULE, TURN)
    words, scale, factor, finite = _quantize(part, number, root, key, RULE, DITHER, TURN)
    codes = _matrix4(tl.trans(words[0]), tl.trans(words[1]), tl.trans(words[2]), tl.trans(words[3]))
    column = first_column + tl.arange(0, COLUMNS)[:, None] * STEP  # anew: a transposed index would pull the layout of
    block = first_block + tl.arange(0, ROWS)[None, :]  # the stores into the arithmetic
    inside = (column < columns) & (block < blocks)
    at = column.to(tl.int64) * (blocks * GROUPS) + (block * GROUPS + GROUP)
    tl.store(packed_ptr + at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], codes, mask=inside[:, :, None])
    tl.store(scale_ptr + at, tl.trans(scale), mask=inside)
    if MASK:
        tl.store(mask_ptr + at, tl.trans(tl.where(finite, _kept(part[0], factor, _fine(RULE, TURN)), 0)), mask=inside)


@triton.jit
def _signed(x, signs_ptr, BLOCK: tl.constexpr):
    y = ()
    for j in tl.static_range(BLOCK):
        y = y + (x[j] * tl.load(signs_ptr + j),)
    return y


@triton.jit(do_not_specialize=["root", "s0", "s1", "o0", "o1"])
def _quantize_columns_kernel(
    x_ptr, signs_ptr, packed_ptr, scale_ptr, mask_ptr, blocks, columns, stride, root, s0, s1, o0, o1, drawn_ptr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
    RULE: tl.constexpr, DITHER: tl.constexpr, DRAWN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    key = _key(s0, s1, o0, o1, drawn_ptr, DRAWN)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (block < blocks) & (column < columns)
    first = tl.program_id(0).to(tl.int64) * ROWS * BLOCK * stride
    x = ()
    for j in tl.static_range(BLOCK):
        at = (tl.arange(0, ROWS)[:, None] * BLOCK + j) * stride + column
        x = x + (tl.load(x_ptr + first + at, mask=inside, other=0.0).to(tl.float32),)
    if SIGNS:
        x = _signed(x, signs_ptr, BLOCK)
    if HADAMARD:
        x = _turn_across(x, BLOCK)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    for g in tl.static_range(GROUPS):
        _store_group(
            _part(x, g * 32, 32), packed_ptr, scale_ptr, mask_ptr, tl.program_id(1) * COLUMNS, tl.program_id(0) * ROWS,
            columns, blocks, root, key, ROWS, COLUMNS, 1, GROUPS, g, RULE, DITHER, MASK, HADAMARD,
        )  # fmt: skip


def quantize_columns(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: Random | None, mask: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> packed [K, M/2], scale [K, M/32], mask [K, M/8] or empty, of its transpose."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    packed, scale, bits = outputs(x, (columns, rows), mask)
    if x.numel():
        block = hadamard or GROUP
        blocks, (tall, wide, warps) = rows // block, (tuned.COLUMNS if random is None else tuned.RANDOM_COLUMNS)[block]
        _quantize_columns_kernel[(triton.cdiv(blocks, tall), triton.cdiv(columns, wide))](
            x, float_signs(signs, x), packed.view(torch.int32), scale, bits.view(torch.int32) if mask else scale,
            blocks, columns, x.stride(0), float(hadamard or 1) ** -0.5, *key_of(random), drawn_of(random, scale),
            BLOCK=block, ROWS=tall, COLUMNS=wide, HADAMARD=hadamard > 0, SIGNS=signs is not None, RULE=str(rule),
            MASK=mask, num_warps=warps, **kind_of(random), **EXACT,
        )  # fmt: skip
    return packed, scale, bits


@triton.jit(do_not_specialize=["root", "s0", "s1", "o0", "o1"])
def _requantize_kernel(
    in_ptr, in_scale_ptr, signs_ptr, packed_ptr, scale_ptr, blocks, columns, root, s0, s1, o0, o1, drawn_ptr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIGNS: tl.constexpr, RULE: tl.constexpr,
    DITHER: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """One nibble of COLUMNS bytes a program: both at once hold 240 registers, in a loop too (of their addresses)."""
    key = _key(s0, s1, o0, o1, drawn_ptr, DRAWN)
    nibble, first_block = tl.program_id(0) % 2, tl.program_id(0) // 2 * ROWS
    first_byte = tl.program_id(1) * COLUMNS
    byte = first_byte + tl.arange(0, COLUMNS)[None, :]
    inside = (first_block + tl.arange(0, ROWS)[:, None] < blocks) & (byte < columns // 2)
    in_ptr += first_block.to(tl.int64) * BLOCK * (columns // 2)
    in_scale_ptr += first_block.to(tl.int64) * BLOCK * (columns // _GROUP)
    x = ()
    for j in tl.static_range(BLOCK):
        row = tl.arange(0, ROWS)[:, None] * BLOCK + j
        code = tl.load(in_ptr + (row * (columns // 2) + byte), mask=inside, other=0).to(tl.int32) >> (nibble * 4)
        at = row * (columns // _GROUP) + byte // (_GROUP // 2)
        power = _scale_value(tl.load(in_scale_ptr + at, mask=inside, other=0))
        x = x + (_value(code, 0) * power,)
    if SIGNS:
        x = _signed(x, signs_ptr, BLOCK)
    x = _turn_across(x, BLOCK)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    for g in tl.static_range(GROUPS):
        _store_group(
            _part(x, g * 32, 32), packed_ptr, scale_ptr, scale_ptr, first_byte * 2 + nibble, first_block, columns,
            blocks, root, key, ROWS, COLUMNS, 2, GROUPS, g, RULE, DITHER, False, True,
        )  # fmt: skip


def requantize(
    packed: Tensor, scale: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: Random | None
) -> tuple[Tensor, Tensor]:
    """packed [M, K/2], scale [M, K/32] -> packed [K, M/2], scale [K, M/32] of the transpose, transformed.

    Blocks of 128 are dequantized first, which is exact: Triton 3.6 aborts while it compiles a thread with 128 codes.
    """
    packed, scale = packed.contiguous(), scale.contiguous()
    if hadamard > 64:
        wide = triton_rows.dequantize(packed, scale, torch.bfloat16)
        return quantize_columns(wide, rule, hadamard, signs, random, False)[:2]
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out, out_scale, _ = outputs(packed, (columns, rows), False)
    if packed.numel():
        blocks, (tall, wide, warps) = rows // hadamard, tuned.PACKED_COLUMNS[hadamard]
        _requantize_kernel[(2 * triton.cdiv(blocks, tall), triton.cdiv(columns // 2, wide))](
            packed, scale, float_signs(signs, scale), out.view(torch.int32), out_scale, blocks, columns,
            float(hadamard) ** -0.5, *key_of(random), drawn_of(random, scale), BLOCK=hadamard, ROWS=tall, COLUMNS=wide,
            SIGNS=signs is not None, RULE=str(rule), num_warps=warps, **kind_of(random), **EXACT,
        )  # fmt: skip
    return out, out_scale
