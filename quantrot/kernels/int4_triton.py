"""INT4 quantization in Triton, with the plain definition's bits: a token's takes longer to launch than to run, and here
it is one launch.

Tensors have up to four dimensions of any strides: heads come transposed, and a cache gives a part of its room. A
program takes TILE groups, in the order of their rows. Two of a GPU's habits would change bits: min() and max() drop
NaN, so that a group's NaN is looked for on its own; products fuse with sums, which EXACT refuses. What goes into or out
of bfloat16 without rounding goes by its bits: the interpreter's conversions lose subnormals.
"""

# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.ready import Run

EXACT = {"enable_fp_fusion": False}  # code * scale + low is two roundings
ELEMENTS = 2048  # of a program, in 4 warps

_FIFTEENTH = tl.constexpr(1 / 15)
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # added to 0 ... 15 it rounds to integers, ties to even, in the lowest bits


@triton.jit
def _offset(group, n1, n2, s0, s1, s2, s3, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a group of a [..., n1, n2, GROUPS * COLUMNS] begins, of strides s0 to s3."""
    row, column = group // GROUPS, (group % GROUPS * COLUMNS).to(tl.int64)
    outer = row // n2
    first, second, third = (outer // n1).to(tl.int64), (outer % n1).to(tl.int64), (row % n2).to(tl.int64)
    return first * s0 + second * s1 + third * s2 + column * s3


@triton.jit
def _wide(x):
    """x as float32."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _rounded(x):
    """float32, rounded to what bfloat16 holds, ties to even; NaN and infinity stay."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def _bfloat16(x):
    """What bfloat16 holds, or a quiet NaN, in bfloat16."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["groups", "n1", "n2"])
def _quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, low_ptr, groups, n1, n2, s0, s1, s2, s3,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PADDED)[None, :]
    start = _offset(group, n1, n2, s0, s1, s2, s3, GROUPS, GROUP)[:, None]
    inside = (group < groups)[:, None] & (column < GROUP)
    x = _wide(tl.load(x_ptr + start + column.to(tl.int64) * s3, mask=inside, other=0.0))
    code, scale, low = _coded(x, column < GROUP)
    _store_codes(codes_ptr, scale_ptr, low_ptr, code, scale, low, group.to(tl.int64), group < groups, GROUP)


@triton.jit(do_not_specialize=["groups", "n1", "n2", "at", "room"])
def _store_kernel(
    k_ptr, v_ptr, key_ptr, key_scale_ptr, key_low_ptr, value_ptr, value_scale_ptr, value_low_ptr, k_out_ptr, v_out_ptr,
    groups, n1, n2, k0, k1, k2, k3, v0, v1, v2, v3, at, room,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _store_numbers(
            k_ptr, key_ptr, key_scale_ptr, key_low_ptr, k_out_ptr, groups, n1, n2, k0, k1, k2, k3, at, room, GROUPS,
            GROUP, PADDED, TILE,
        )  # fmt: skip
    else:
        _store_numbers(
            v_ptr, value_ptr, value_scale_ptr, value_low_ptr, v_out_ptr, groups, n1, n2, v0, v1, v2, v3, at, room,
            GROUPS, GROUP, PADDED, TILE,
        )  # fmt: skip


@triton.jit
def _store_numbers(
    x_ptr, codes_ptr, scale_ptr, low_ptr, out_ptr, groups, n1, n2, s0, s1, s2, s3, at, room,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of n2 tokens a head: codes to place `at` of the head's room and on, what they stand for to out."""
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, PADDED)[None, :]
    start = _offset(group, n1, n2, s0, s1, s2, s3, GROUPS, GROUP)[:, None]
    inside = (group < groups)[:, None] & (column < GROUP)
    x = _wide(tl.load(x_ptr + start + column.to(tl.int64) * s3, mask=inside, other=0.0))
    code, scale, low = _coded(x, column < GROUP)
    row = group // GROUPS
    place = ((row // n2).to(tl.int64) * room + at + row % n2) * GROUPS + group % GROUPS
    _store_codes(codes_ptr, scale_ptr, low_ptr, code, scale, low, place, group < groups, GROUP)
    y = code.to(tl.float32) * scale[:, None] + low[:, None]
    tl.store(out_ptr + group.to(tl.int64)[:, None] * GROUP + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _coded(x, real):
    """Groups [TILE, PADDED] of float32, of which the real columns count: codes, scales, lows."""
    nan = tl.max((x != x).to(tl.int32), 1) > 0
    least = tl.min(tl.where(real, x, float("inf")), 1)
    most = tl.max(tl.where(real, x, float("-inf")), 1)
    low = _rounded(tl.where(nan, float("nan"), least)) + 0.0
    scale = _rounded((most - low) * _FIFTEENTH)
    scale = tl.where(scale == 0.0, 1.0, scale)
    finite = tl.abs(scale) < float("inf")
    steps = tl.math.div_rn(x - low[:, None], scale[:, None])
    steps = tl.minimum(tl.maximum(tl.where(finite[:, None], steps, 0.0), 0.0), 15.0)
    return (steps + _MAGIC).to(tl.int32, bitcast=True) & 15, tl.where(finite, scale, float("nan")), low


@triton.jit
def _store_codes(codes_ptr, scale_ptr, low_ptr, code, scale, low, place, real, GROUP: tl.constexpr):
    """Groups to their places, int64 [TILE]."""
    even, odd = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    byte = tl.arange(0, code.shape[1] // 2)[None, :]
    at = place[:, None] * (GROUP // 2) + byte
    tl.store(codes_ptr + at, (even | (odd << 4)).to(tl.uint8), mask=real[:, None] & (byte < GROUP // 2))
    tl.store(scale_ptr + place, _bfloat16(scale), mask=real)
    tl.store(low_ptr + place, _bfloat16(low), mask=real)


@triton.jit(do_not_specialize=["groups", "n1", "n2"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, low_ptr, x_ptr, groups, n1, n2, c0, c1, c2, c3, s0, s1, s2, s3, l0, l1, l2, l3,
    GROUPS: tl.constexpr, BYTES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    byte = tl.arange(0, PADDED)[None, :]
    start = _offset(group, n1, n2, c0, c1, c2, c3, GROUPS, BYTES)[:, None]
    inside = (group < groups)[:, None] & (byte < BYTES)
    codes = tl.load(codes_ptr + start + byte.to(tl.int64) * c3, mask=inside, other=0)
    scale_at = _offset(group, n1, n2, s0, s1, s2, s3, GROUPS, 1)
    low_at = _offset(group, n1, n2, l0, l1, l2, l3, GROUPS, 1)
    scale = _wide(tl.load(scale_ptr + scale_at, mask=group < groups, other=0.0))[:, None]
    low = _wide(tl.load(low_ptr + low_at, mask=group < groups, other=0.0))[:, None]
    even, odd = (codes & 15).to(tl.float32) * scale + low, (codes >> 4).to(tl.float32) * scale + low
    x = tl.reshape(tl.join(even, odd), (TILE, 2 * PADDED))
    column = tl.arange(0, 2 * PADDED)[None, :]
    at = group.to(tl.int64)[:, None] * (2 * BYTES) + column
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=(group < groups)[:, None] & (column < 2 * BYTES))


def _rows(x: Tensor) -> tuple[int, ...]:
    """(n1, n2, four strides) of a tensor of up to four dimensions, seen as [n0, n1, n2, columns]."""
    return *(1, 1, *x.shape)[-3:-1], *(0, 0, 0, *x.stride())[-4:]


def _padded(size: int) -> int:
    """The power of two from size on; triton.next_power_of_2 takes 1.5 us for it."""
    return 1 << (size - 1).bit_length()


def prepare_quantize(x: Tensor, group: int) -> Run:
    """An x [..., D] like this one -> codes, scale, low. Checked by the caller."""
    (*rows, width), device, lies = x.shape, x.device, _rows(x)
    groups, padded = x.numel() // group, _padded(group)
    tile = ELEMENTS // padded
    kernel = _quantize_kernel[(-(-groups // tile),)]

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.empty((*rows, width // 2), dtype=torch.uint8, device=device)
        scale = torch.empty((*rows, width // group), dtype=torch.bfloat16, device=device)
        low = torch.empty_like(scale)
        kernel(
            x, codes, scale, low, groups, *lies, GROUPS=width // group, GROUP=group, PADDED=padded, TILE=tile,
            num_warps=4, **EXACT,
        )  # fmt: skip
        return codes, scale, low

    return run


def prepare_store(k: Tensor, v: Tensor, group: int, room: int) -> Run:
    """k, v [B, G, S, D] like these, a cache with room for `room` tokens, the first one's place -> k and v as they are
    dequantized. Checked by the caller."""
    across, groups, padded = k.shape[3] // group, k.numel() // group, _padded(group)
    tile = ELEMENTS // padded
    lie = *_rows(k), *_rows(v)[2:]
    kernel = _store_kernel[-(-groups // tile), 2]

    def run(k: Tensor, v: Tensor, cache: tuple[Tensor, ...], at: int) -> tuple[Tensor, Tensor]:
        key, value = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
        kernel(
            k, v, *cache, key, value, groups, *lie, at, room, GROUPS=across, GROUP=group, PADDED=padded, TILE=tile,
            num_warps=4, **EXACT,
        )  # fmt: skip
        return key, value

    return run


def prepare_dequantize(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> Run:
    """codes, scale and low like these -> [..., D] in `dtype`. Checked by the caller."""
    (*rows, half), device, groups, across = codes.shape, codes.device, scale.numel(), scale.shape[-1]
    each = half // across
    padded = _padded(each)
    tile = ELEMENTS // (2 * padded)
    lie = *_rows(codes), *_rows(scale)[2:], *_rows(low)[2:]
    kernel = _dequantize_kernel[(-(-groups // tile),)]

    def run(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        x = torch.empty((*rows, 2 * half), dtype=dtype, device=device)
        kernel(
            codes, scale, low, x, groups, *lie, GROUPS=across, BYTES=each, PADDED=padded, TILE=tile, num_warps=4,
            **EXACT,
        )  # fmt: skip
        return x

    return run
