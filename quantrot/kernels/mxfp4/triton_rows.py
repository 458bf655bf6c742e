"""MXFP4 along rows, in Triton: each kernel one read and one write, a thread a block of 32, 64 or 128 columns."""

# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.mxfp4 import tuned
from quantrot.kernels.mxfp4.reference import GROUP, LEAST_TOP, TOP, WINDOW, Random, ScaleRule
from quantrot.kernels.mxfp4.triton import (
    EXACT,
    _clamps,
    _columns,
    _e2m1,
    _exponent,
    _factor,
    _fine,
    _kept,
    _key,
    _load_block,
    _matrix4,
    _part,
    _power,
    _quantize,
    _scale_value,
    _times,
    _times_each,
    _turn_across,
    _turn_within,
    _turned,
    _value,
    drawn_of,
    float_signs,
    floats,
    key_of,
    kind_of,
    outputs,
    vector_of,
)

LARGEST_ROW = 512  # threads that hold a row whose e4m3 operand is written at once

_GROUP = tl.constexpr(GROUP)
_TOP = tl.constexpr(TOP)
_LEAST_TOP = tl.constexpr(LEAST_TOP)
_WINDOW = tl.constexpr(WINDOW)


@triton.jit(do_not_specialize=["threads", "root", "s0", "s1", "o0", "o1"])
def _quantize_rows_kernel(
    x_ptr, signs_ptr, packed_ptr, scale_ptr, mask_ptr, threads, root, s0, s1, o0, o1, drawn_ptr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
    RULE: tl.constexpr, DITHER: tl.constexpr, DRAWN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    key = _key(s0, s1, o0, o1, drawn_ptr, DRAWN)
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < threads - first
    x = _load_block(x_ptr + first * BLOCK, thread, inside, BLOCK, VECTOR)
    if SIGNS:
        x = _times_each(x, _load_block(signs_ptr, thread * 0, inside, BLOCK, 4))
    if HADAMARD:
        x = _turn_across(x, BLOCK)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    for g in tl.static_range(GROUPS):
        part = _turned(_part(x, g * _GROUP, _GROUP), RULE, HADAMARD)
        local = thread * GROUPS + g
        words, scale, factor, finite = _quantize(part, first * GROUPS + local, root, key, RULE, DITHER, HADAMARD)
        codes = _matrix4(words[0], words[1], words[2], words[3])
        at = local[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(packed_ptr + first * GROUPS * 4 + at, codes, mask=inside[:, None])
        tl.store(scale_ptr + first * GROUPS + local, scale, mask=inside)
        if MASK:
            kept = tl.where(finite, _kept(part[0], factor, _fine(RULE, HADAMARD)), 0)
            tl.store(mask_ptr + first * GROUPS + local, kept, mask=inside)


def quantize(
    x: Tensor,
    rule: ScaleRule,
    hadamard: int,
    signs: Tensor | None,
    random: Random | None,
    mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> packed, scale, mask (empty unless asked for). Checked by the caller."""
    x = floats(x).contiguous()
    packed, scale, bits = outputs(x, x.shape, mask)
    if x.numel():
        block = hadamard or GROUP
        threads, tile = x.numel() // block, tuned.ROW_THREADS[block]
        _quantize_rows_kernel[(triton.cdiv(threads, tile),)](
            x, float_signs(signs, x), packed.view(torch.int32), scale, bits.view(torch.int32) if mask else scale,
            threads, float(hadamard or 1) ** -0.5, *key_of(random), drawn_of(random, scale), BLOCK=block, TILE=tile,
            VECTOR=vector_of(x), HADAMARD=hadamard > 0, SIGNS=signs is not None, RULE=str(rule), MASK=mask,
            num_warps=tile // 32, **kind_of(random), **EXACT,
        )  # fmt: skip
    return packed, scale, bits


@triton.jit
def _row_part(first, row, count, COUNT: tl.constexpr):
    """Numbers of the groups `first` ... of a row, those past `count` masked."""
    group = first + tl.arange(0, COUNT)
    return group, group < count


@triton.jit
def _matrix4x4(a, b, c, d):
    """[n, 4] four times -> [n, 16], one after the other."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))  # [n, 4, 2, 2]
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (a.shape[0], 16))


@triton.jit
def _store_e4m3(ptr, values, power, at, inside):
    """A tuple of 32 e2m1 values times a power of two as e4m3, to nearest even where it is not exact, 16 at a time."""
    for half in tl.static_range(2):
        quads = ()
        for q in tl.static_range(4):
            four = _part(values, half * 16 + q * 4, 4)
            quads = quads + (_matrix4(four[0], four[1], four[2], four[3]),)
        row = _matrix4x4(quads[0], quads[1], quads[2], quads[3]) * power[:, None]
        codes = row.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(ptr + at[:, None] + half * 16 + tl.arange(0, 16)[None, :], codes, mask=inside[:, None])


@triton.jit
def _used(words):
    """Whether a group has a code other than +-0."""
    return ((words[0] | words[1] | words[2] | words[3]) & 0x77777777) != 0


@triton.jit
def _window(exponent, finite, top):
    """(2^(exponent relative to the row's scale) or NaN, whether a group lies below the window)."""
    shift = exponent - top + _TOP
    power = _power(tl.minimum(tl.maximum(shift, -126), _TOP))
    return tl.where(finite, power, float("nan")), finite & (shift <= _TOP - _WINDOW)


@triton.jit
def _load_words(ptr, at, inside):
    """The four int32 words of codes of each thread's group."""
    codes = tl.load(ptr + at[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
    return _columns(codes)


@triton.jit
def _expand_kernel(
    packed_ptr, scale_ptr, out_ptr, row_scale_ptr, outside_ptr, groups,
    TILE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    everyone = tl.arange(0, ALL)
    bytes_ = tl.load(scale_ptr + row * groups + everyone, mask=everyone < groups, other=0).to(tl.int32)
    top = tl.max(tl.where(bytes_ == 255, 0, bytes_), axis=0) - 127
    top = tl.maximum(top, _LEAST_TOP)
    tl.store(row_scale_ptr + row, _power(top - _TOP))
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, groups, TILE):
        group, inside = _row_part(start, row, groups, TILE)
        words = _load_words(packed_ptr + row * groups * 4, group, inside)
        byte = tl.load(scale_ptr + row * groups + group, mask=inside, other=0).to(tl.int32)
        finite = byte != 255
        power, below = _window(byte - 127, finite, top)
        count += (below & _used(words)).to(tl.int32)
        values = ()
        for w in tl.static_range(4):
            for i in tl.static_range(8):
                values = values + (_value(words[w], 4 * i),)
        _store_e4m3(out_ptr + row * groups * 32, values, power, group * 32, inside)
    tl.store(outside_ptr + row, tl.sum(count, axis=0))


def expand(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """packed [N, K/2], scale [N, K/32] -> e4m3 [N, K], row scale [N], outside [N]: a program a row."""
    rows, groups = scale.shape
    out, row_scale, outside = room(rows, groups * GROUP, packed.device)
    if not groups:
        row_scale.fill_(2.0 ** (LEAST_TOP - TOP))
        outside.zero_()
    elif rows:
        tile = min(128, max(32, triton.next_power_of_2(groups)))
        words, scale = packed.contiguous().view(torch.int32), scale.contiguous()
        _expand_kernel[(rows,)](
            words, scale, out.view(torch.uint8), row_scale, outside, groups, TILE=tile,
            ALL=triton.next_power_of_2(groups), num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return out, row_scale, outside


def room(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Empty e4m3, row scale and outside of a matrix."""
    return (
        torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _load_row(
    x_ptr, signs_ptr, row, threads, BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, TILE)
    inside = thread < threads
    x = _load_block(x_ptr + row * threads * BLOCK, thread, inside, BLOCK, VECTOR)
    if SIGNS:
        x = _times_each(x, _load_block(signs_ptr, thread * 0, inside, BLOCK, 4))
    if HADAMARD:
        x = _turn_across(x, BLOCK)
    return x


@triton.jit(do_not_specialize=["root"])
def _quantize_expanded_kernel(
    x_ptr, signs_ptr, out_ptr, row_scale_ptr, outside_ptr, packed_ptr, scale_ptr, threads, root,
    BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    thread = tl.arange(0, TILE)
    inside = thread < threads
    x = _load_row(x_ptr, signs_ptr, row, threads, BLOCK, TILE, VECTOR, HADAMARD, SIGNS)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    parts = ()
    exponents = ()
    finites = ()
    top = tl.full((TILE,), -127, tl.int32)
    for g in tl.static_range(GROUPS):
        part = _turned(_part(x, g * 32, 32), RULE, HADAMARD)
        exponent, finite = _exponent(part, root, RULE, HADAMARD)
        parts = parts + (part[0],)
        exponents = exponents + (exponent,)
        finites = finites + (finite,)
        top = tl.maximum(top, tl.where(finite & inside, exponent, -127))
    largest = tl.maximum(tl.max(top, axis=0), _LEAST_TOP)
    tl.store(row_scale_ptr + row, _power(largest - _TOP))
    rare = tl.zeros((TILE,), tl.int32)
    for g in tl.static_range(GROUPS):
        power, below = _window(exponents[g], finites[g], largest)
        rare = rare | (below & inside).to(tl.int32)
        values = ()
        for i in tl.static_range(32):
            factor = _factor(exponents[g], root, RULE)
            values = values + (_e2m1(parts[g][i], factor, _clamps(RULE), _fine(RULE, HADAMARD)),)
        at = (thread * GROUPS + g) * 32
        _store_e4m3(out_ptr + row * threads * BLOCK, values, power, at, inside)
    if tl.max(rare, axis=0) == 0:
        tl.store(outside_ptr + row, 0)
    else:  # groups of zeros, or outside the window: count these, and keep the row for who multiplies it exactly
        count = tl.zeros((TILE,), tl.int32)
        again = _load_row(x_ptr, signs_ptr, row, threads, BLOCK, TILE, VECTOR, HADAMARD, SIGNS)  # frees x's registers
        for g in tl.static_range(GROUPS):
            part = _turned(_part(again, g * 32, 32), RULE, HADAMARD)
            words, byte, _, finite = _quantize(part, thread, root, (0, 0, 0, 0), RULE, False, HADAMARD)
            _, below = _window(byte.to(tl.int32) - 127, finite, largest)
            count += (below & _used(words) & inside).to(tl.int32)
            group = row * threads * GROUPS + thread * GROUPS + g
            codes = _matrix4(words[0], words[1], words[2], words[3])
            tl.store(packed_ptr + group[:, None] * 4 + tl.arange(0, 4)[None, :], codes, mask=inside[:, None])
            tl.store(scale_ptr + group, byte, mask=inside)
        tl.store(outside_ptr + row, tl.sum(count, axis=0))


def quantize_expanded(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> e4m3, row scale, outside; packed and scale, written where a row's outside is not 0."""
    x = floats(x).contiguous()
    rows, width = x.shape
    block = hadamard or GROUP
    threads = width // block
    tile = max(32, triton.next_power_of_2(threads))
    if tile > LARGEST_ROW or not threads:
        packed, scale, _ = quantize(x, rule, hadamard, signs, None, False)
        return *expand(packed, scale), packed, scale
    out, row_scale, outside = room(rows, width, x.device)
    packed, scale, _ = outputs(x, x.shape, False)
    if rows:
        _quantize_expanded_kernel[(rows,)](
            x, float_signs(signs, x), out.view(torch.uint8), row_scale, outside, packed.view(torch.int32), scale,
            threads, float(hadamard or 1) ** -0.5, BLOCK=block, TILE=tile, VECTOR=vector_of(x), HADAMARD=hadamard > 0,
            SIGNS=signs is not None, RULE=str(rule), num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return out, row_scale, outside, packed, scale


@triton.jit
def _dequantize_kernel(packed_ptr, scale_ptr, out_ptr, groups, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < groups - first
    words = _load_words(packed_ptr + first * 4, thread, inside)
    byte = tl.load(scale_ptr + first + thread, mask=inside, other=0)
    power = tl.where(byte == 255, float("nan"), _scale_value(byte))
    for q in tl.static_range(4):
        low = _matrix4(_value(words[q], 0), _value(words[q], 4), _value(words[q], 8), _value(words[q], 12))
        high = _matrix4(_value(words[q], 16), _value(words[q], 20), _value(words[q], 24), _value(words[q], 28))
        both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (TILE, 8)) * power[:, None]
        at = thread[:, None] * 32 + q * 8 + tl.arange(0, 8)[None, :]
        tl.store(out_ptr + first * 32 + at, both.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] in `dtype`: a thread a group."""
    out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype, device=packed.device)
    groups, tile = scale.numel(), 128
    if groups:
        _dequantize_kernel[(triton.cdiv(groups, tile),)](
            packed.contiguous().view(torch.int32), scale.contiguous(), out, groups, TILE=tile, num_warps=4, **EXACT
        )
    return out


@triton.jit
def _store_block(ptr, values, thread, inside, BLOCK: tl.constexpr):
    """The tuple of each thread's block, four neighbours at a time."""
    for q in tl.static_range(BLOCK // 4):
        four = _matrix4(values[4 * q], values[4 * q + 1], values[4 * q + 2], values[4 * q + 3])
        at = thread[:, None] * BLOCK + q * 4 + tl.arange(0, 4)[None, :]
        tl.store(ptr + at, four.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["threads", "root"])
def _round_trip_kernel(
    x_ptr, y_ptr, threads, root, BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, HADAMARD: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < threads - first
    x = _load_block(x_ptr + first * BLOCK, thread, inside, BLOCK, VECTOR)
    if HADAMARD:
        x = _turn_across(x, BLOCK)
    y = ()
    for g in tl.static_range(BLOCK // _GROUP):
        part = _turned(_part(x, g * 32, 32), RULE, HADAMARD)
        exponent, finite = _exponent(part, root, RULE, HADAMARD)
        power = tl.where(finite, _scale_value(exponent + 127), float("nan"))
        for i in tl.static_range(32):
            factor = _factor(exponent, root, RULE)
            y = y + (_e2m1(part[0][i], factor, _clamps(RULE), _fine(RULE, HADAMARD)) * power,)
    _store_block(y_ptr + first * BLOCK, y, thread, inside, BLOCK)


def round_trip(x: Tensor, rule: ScaleRule, hadamard: int) -> Tensor:
    """x [..., K] as bfloat16 after transform, quantization and dequantization, which bfloat16 holds exactly."""
    x = floats(x).contiguous()
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    block = hadamard or GROUP
    threads, tile = x.numel() // block, 32  # for few tokens: as many programs as there are
    if threads:
        _round_trip_kernel[(triton.cdiv(threads, tile),)](
            x, y, threads, float(hadamard or 1) ** -0.5, BLOCK=block, TILE=tile, VECTOR=vector_of(x),
            HADAMARD=hadamard > 0, RULE=str(rule), num_warps=1, **EXACT,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["root"])
def _masked_hadamard_kernel(
    x_ptr, mask_ptr, y_ptr, threads, root, BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < threads - first
    GROUPS: tl.constexpr = BLOCK // _GROUP
    x = _load_block(x_ptr + first * BLOCK, thread, inside, BLOCK, VECTOR)
    kept = ()
    for g in tl.static_range(GROUPS):
        bits = tl.load(mask_ptr + first * GROUPS + thread * GROUPS + g, mask=inside, other=0)
        for i in tl.static_range(32):
            kept = kept + (tl.where(((bits >> i) & 1) != 0, x[g * 32 + i], 0.0),)
    kept = _turn_across(kept, BLOCK)
    y = ()
    for g in tl.static_range(GROUPS):
        y = y + _times(_turn_within(_part(kept, g * 32, 32)), root)
    _store_block(y_ptr + first * BLOCK, y, thread, inside, BLOCK)


def masked_hadamard(x: Tensor, mask: Tensor, hadamard: int, scale: float, dtype: torch.dtype) -> Tensor:
    """x where the mask is set, turned, in dtype: a thread a block."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    threads, tile = x.numel() // hadamard, tuned.ROW_THREADS[hadamard]
    if threads:
        _masked_hadamard_kernel[(triton.cdiv(threads, tile),)](
            x, mask.contiguous().view(torch.int32), y, threads, scale, BLOCK=hadamard, TILE=tile, VECTOR=vector_of(x),
            num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return y
