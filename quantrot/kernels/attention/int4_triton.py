"""int4_token's kernel in Triton: split-KV decoding that reads codes and never writes a wide key or value.

A program has a part of a key head's tokens. Codes become numbers in registers: a byte holds an even column in its low
nibble and an odd one in its high nibble, so that the queries' even and odd columns multiply one each, and the output's
are two accumulators. The last program of a head, whose part is the shortest, has the new token beside it: it writes its
codes, and starts its sums with what they stand for, so that nothing is read that is written. A second kernel adds the
programs' sums in a fixed order.

Two roundings of float32 to bfloat16 are by bits, as in int4_triton: the interpreter's loses subnormals.
"""

# mypy: disable-error-code="assignment, misc"

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.attention.int4_token import turned
from quantrot.kernels.attention.reference import LOG2E, Turn
from quantrot.kernels.int4_triton import _FIFTEENTH, _MAGIC, _bfloat16, _padded, _rounded, _wide
from quantrot.kernels.nvrtc import processors
from quantrot.kernels.ready import Run

PTX = not triton.knobs.runtime.interpret
LARGEST_SPLIT = 128  # programs of a key head, whose sums one program adds


@dataclass(frozen=True)
class Config:
    """A launch: tokens of a tile, warps of a program, tiles on their way, programs a multiprocessor."""

    tokens: int
    warps: int
    stages: int
    programs: int


@lru_cache(maxsize=256)
def config_for(dim: int) -> Config:
    """The decode kernel's launch: of ten the fastest on an H200 (batch 32, 8192 tokens, head_dim 128: 188 us, 223 with
    four warps and three stages)."""
    return Config(64, 2, 2, 4) if dim <= 128 else Config(32, 4, 3, 3)


@triton.jit
def _numbers(codes, scale, low, to: tl.constexpr, PTX: tl.constexpr):
    """Even and odd columns of codes [T, groups, bytes]; scale and low [T, groups, 1] are bfloat16.

    128 + code is code's bits below those of 128 in bfloat16, whence one product and sum, rounded once, is left. It is
    not called pure: Triton 3.9 looks through what is for the narrowest load, and has tensor cores take their operands
    as if those were bytes, with four times the loads from shared memory and a move for each register.
    """
    if PTX and to == tl.bfloat16:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 e, o, a, b, c, d, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC300C300;
            and.b32 e, $4, 0x0F0F0F0F;
            shr.u32 o, $4, 4;
            and.b32 o, o, 0x0F0F0F0F;
            prmt.b32 a, e, 0x43434343, 0x4140;
            prmt.b32 b, e, 0x43434343, 0x4342;
            prmt.b32 c, o, 0x43434343, 0x4140;
            prmt.b32 d, o, 0x43434343, 0x4342;
            fma.rn.bf16x2 a, a, one, less;
            fma.rn.bf16x2 b, b, one, less;
            fma.rn.bf16x2 c, c, one, less;
            fma.rn.bf16x2 d, d, one, less;
            fma.rn.bf16x2 $0, a, $5, $7;
            fma.rn.bf16x2 $1, b, $6, $8;
            fma.rn.bf16x2 $2, c, $5, $7;
            fma.rn.bf16x2 $3, d, $6, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, scale, low],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=False,
            pack=4,
        )
    else:
        scale, low = _wide(scale), _wide(low)
        even = _narrow((codes & 15).to(tl.float32) * scale + low, to, PTX)
        odd = _narrow((codes >> 4).to(tl.float32) * scale + low, to, PTX)
    return even, odd


@triton.jit
def _narrow(x, to: tl.constexpr, PTX: tl.constexpr):
    """float32 in the dtype `to`."""
    if to == tl.bfloat16 and not PTX:
        x = _bfloat16(_rounded(x))
    return x.to(to)


@triton.jit
def _dot(a, b, acc, PTX: tl.constexpr):
    """acc + a b; the interpreter knows no product of bfloat16."""
    if not PTX:
        a, b = _wide(a), _wide(b)
    return tl.dot(a, b, acc)


@triton.jit
def _new_token(
    x_ptr, codes_ptr, scale_ptr, low_ptr, token, stored,
    D: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Store a row of D numbers at `token` as quantize_int4 does (stored: 1, or 0 for not to): what its even and odd
    columns then are, [GROUPS, BYTES]."""
    group = tl.arange(0, GROUPS)
    byte = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    inside = byte < D // 2
    even = _wide(tl.load(x_ptr + 2 * byte, mask=inside, other=0.0))
    odd = _wide(tl.load(x_ptr + 2 * byte + 1, mask=inside, other=0.0))
    nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), 1) > 0
    least = tl.min(tl.where(inside, tl.minimum(even, odd), float("inf")), 1)
    most = tl.max(tl.where(inside, tl.maximum(even, odd), float("-inf")), 1)
    low = _rounded(tl.where(nan, float("nan"), least)) + 0.0
    scale = _rounded((most - low) * _FIFTEENTH)
    scale = tl.where(scale == 0.0, 1.0, scale)
    finite = tl.abs(scale) < float("inf")
    even, odd = _code(even, scale, low, finite), _code(odd, scale, low, finite)
    scale = tl.where(finite, scale, float("nan"))
    tl.store(codes_ptr + token * (D // 2) + byte, (even | (odd << 4)).to(tl.uint8), mask=byte < D // 2 * stored)
    tl.store(scale_ptr + token * GROUPS + group, _bfloat16(scale), mask=group < GROUPS * stored)
    tl.store(low_ptr + token * GROUPS + group, _bfloat16(low), mask=group < GROUPS * stored)
    even = even.to(tl.float32) * scale[:, None] + low[:, None]
    odd = odd.to(tl.float32) * scale[:, None] + low[:, None]
    return tl.where(inside, even, 0.0), tl.where(inside, odd, 0.0)


@triton.jit
def _code(x, scale, low, finite):
    steps = tl.math.div_rn(x - low[:, None], scale[:, None])
    steps = tl.minimum(tl.maximum(tl.where(finite[:, None], steps, 0.0), 0.0), 15.0)
    return (steps + _MAGIC).to(tl.int32, bitcast=True) & 15


@triton.jit
def _steps(ptr, token, last, GROUPS: tl.constexpr):
    """The numbers of each token's groups, side by side in one integer."""
    if GROUPS == 1:
        at = ptr.to(tl.pointer_type(tl.int16))
    elif GROUPS == 2:
        at = ptr.to(tl.pointer_type(tl.int32))
    else:
        at = ptr.to(tl.pointer_type(tl.int64))
    return tl.load(at + token, mask=token < last, other=0)


@triton.jit
def _by_group(steps, GROUPS: tl.constexpr):
    """Such numbers as bfloat16 [T, groups, 1]."""
    group = tl.arange(0, GROUPS)[None, :, None]
    return (steps[:, None, None] >> (16 * group).to(steps.dtype)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _codes(ptr, token, byte, last, BYTES: tl.constexpr):
    inside = (token < last)[:, None] & (byte < BYTES)[None, :]
    return tl.load(ptr + token[:, None] * BYTES + byte[None, :], mask=inside, other=0)


@triton.jit(do_not_specialize=["at", "limit", "room", "mask_batch"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, key_ptr, key_scale_ptr, key_low_ptr, value_ptr, value_scale_ptr, value_low_ptr, mask_ptr,
    count_ptr, part_ptr, stats_ptr, q_batch, q_head, k_batch, k_head, v_batch, v_head, mask_batch, kv_heads, room, at,
    limit, scale,
    SHARE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr,
    BYTES: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, COUNTED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    split, splits = tl.program_id(1), tl.num_programs(1)
    pair = tl.program_id(0).to(tl.int64)
    batch, kv = pair // kv_heads, pair % kv_heads
    if COUNTED:
        at = tl.load(count_ptr).to(tl.int32)
    to: tl.constexpr = q_ptr.dtype.element_ty
    used = tl.minimum(at, limit)
    tiles = tl.cdiv(used, BN)
    each = tl.cdiv(tiles, splits)
    first = tl.minimum(split * each, tiles) * BN
    last = tl.minimum((split + 1) * each * BN, used)
    row = tl.arange(0, ROWS)
    byte = tl.arange(0, HALF)
    n = tl.arange(0, BN)
    live = row < SHARE
    wanted = live[:, None] & (byte < D // 2)[None, :]
    q_at = q_ptr + batch * q_batch + (kv * SHARE + row)[:, None] * q_head + 2 * byte[None, :]
    q_even, q_odd = tl.load(q_at, mask=wanted, other=0.0), tl.load(q_at + 1, mask=wanted, other=0.0)
    key_at, value_at = key_ptr + pair * room * (D // 2), value_ptr + pair * room * (D // 2)
    key_scale_at, key_low_at = key_scale_ptr + pair * room * GROUPS, key_low_ptr + pair * room * GROUPS
    value_scale_at, value_low_at = value_scale_ptr + pair * room * GROUPS, value_low_ptr + pair * room * GROUPS
    mask_at = mask_ptr + batch * mask_batch

    even = tl.zeros([ROWS, HALF], tl.float32)
    odd = tl.zeros([ROWS, HALF], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if split == splits - 1:
        fits = at < limit
        new_k, new_k_odd = _new_token(
            k_ptr + batch * k_batch + kv * k_head, key_at, key_scale_at, key_low_at, at.to(tl.int64), fits.to(tl.int32),
            D, GROUPS, BYTES,
        )  # fmt: skip
        new_v, new_v_odd = _new_token(
            v_ptr + batch * v_batch + kv * v_head, value_at, value_scale_at, value_low_at, at.to(tl.int64),
            fits.to(tl.int32), D, GROUPS, BYTES,
        )  # fmt: skip
        seen = fits
        if MASK:
            seen = seen & (tl.load(mask_at + at, mask=fits, other=0) != 0)
        k_even = _wide(_narrow(tl.reshape(new_k, (1, HALF)), to, PTX))
        k_odd = _wide(_narrow(tl.reshape(new_k_odd, (1, HALF)), to, PTX))
        s = tl.sum(_wide(q_even) * k_even + _wide(q_odd) * k_odd, 1) * scale
        top = tl.where(seen, s, top)
        total = tl.where(fits, tl.where(seen, 1.0, total), float("nan"))
        even = tl.where(seen, _wide(_narrow(tl.reshape(new_v, (1, HALF)), to, PTX)), even)
        odd = tl.where(seen, _wide(_narrow(tl.reshape(new_v_odd, (1, HALF)), to, PTX)), odd)
    # Scales are too narrow for asynchronous copies: they are fetched one tile ahead by hand.
    k_scale, k_low = _steps(key_scale_at, first + n, last, GROUPS), _steps(key_low_at, first + n, last, GROUPS)
    v_scale, v_low = _steps(value_scale_at, first + n, last, GROUPS), _steps(value_low_at, first + n, last, GROUPS)
    for start in tl.range(first, last, BN):
        token = start + n
        visible = token < last
        if MASK:
            visible = visible & (tl.load(mask_at + token, mask=visible, other=0) != 0)
        ahead = token + BN
        k_codes, v_codes = _codes(key_at, token, byte, last, D // 2), _codes(value_at, token, byte, last, D // 2)
        next_k_scale, next_k_low = _steps(key_scale_at, ahead, last, GROUPS), _steps(key_low_at, ahead, last, GROUPS)
        next_v_scale = _steps(value_scale_at, ahead, last, GROUPS)
        next_v_low = _steps(value_low_at, ahead, last, GROUPS)
        codes, steps = tl.reshape(k_codes, (BN, GROUPS, BYTES)), _by_group(k_scale, GROUPS)
        k_even, k_odd = _numbers(codes, steps, _by_group(k_low, GROUPS), to, PTX)
        s = _dot(q_even, tl.trans(tl.reshape(k_even, (BN, HALF))), tl.zeros([ROWS, BN], tl.float32), PTX)
        s = _dot(q_odd, tl.trans(tl.reshape(k_odd, (BN, HALF))), s, PTX) * scale
        s = tl.where(visible[None, :], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v_scale, v_low = tl.where(visible, v_scale, 0), tl.where(visible, v_low, 0)  # what is hidden may be NaN
        codes, steps = tl.reshape(v_codes, (BN, GROUPS, BYTES)), _by_group(v_scale, GROUPS)
        v_even, v_odd = _numbers(codes, steps, _by_group(v_low, GROUPS), to, PTX)
        p = _narrow(p, to, PTX)
        even = _dot(p, tl.reshape(v_even, (BN, HALF)), even * shrink[:, None], PTX)
        odd = _dot(p, tl.reshape(v_odd, (BN, HALF)), odd * shrink[:, None], PTX)
        top, k_scale, k_low, v_scale, v_low = now, next_k_scale, next_k_low, next_v_scale, next_v_low
    place = (pair * SHARE + row) * splits + split
    part_at = part_ptr + place[:, None] * D + 2 * byte[None, :]
    tl.store(part_at, even, mask=wanted)
    tl.store(part_at + 1, odd, mask=wanted)
    tl.store(stats_ptr + place * 2, top, mask=live)
    tl.store(stats_ptr + place * 2 + 1, total, mask=live)


@triton.jit
def _merge_kernel(
    part_ptr, stats_ptr, out_ptr, count_ptr, splits,
    D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, ADVANCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """One query head: the splits' sums, always in the same order. ADVANCE: the count, which all have read, is one
    more."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    at = row * splits + i
    top = tl.load(stats_ptr + at * 2, mask=i < splits, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=i < splits, other=0.0)
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(total * weight, 0)
    y = tl.sum(part * weight[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(out_ptr + row * D + d, _narrow(y, out_ptr.dtype.element_ty, PTX), mask=d < D)
    if ADVANCE:
        if row == 0:
            tl.store(count_ptr, tl.load(count_ptr) + 1)


# --- Launches --------------------------------------------------------------------------------------------------------


def splits_for(pairs: int, tokens: int, config: Config, units: int) -> int:
    """How many programs share the tokens of a key head, of which there are `pairs`; a tile each at least."""
    return max(1, min(-(-tokens // config.tokens), LARGEST_SPLIT, config.programs * units // pairs))


def prepare(
    q: Tensor, cache: tuple[Tensor, ...], counted: bool, advance: bool, limit: int, mask: Tensor | None, scale: float,
    config: Config | None = None, splits: int | None = None,
) -> Run:  # fmt: skip
    """The kernels on operands like these, as a function of q, k, v, their turn, the cache, the count or None, the place
    where there is none, and the mask; checked by the caller. config, splits: instead of the rule's (to measure)."""
    (batch, heads, _, dim), (kv_heads, room), groups = q.shape, cache[0].shape[1:3], cache[1].shape[3]
    if any(t.data_ptr() % 8 for t in cache):  # of which Dynamo knows nothing
        raise ValueError("int4_attend_one: a cache that does not start at a multiple of 8 bytes")
    share, half, pairs = heads // kv_heads, _padded(max(32, dim)) // 2, batch * kv_heads
    chosen = config or config_for(dim)
    units = processors(q.device.index if q.device.type == "cuda" else -1)
    sizes: dict[str, Any] = {
        "SHARE": share, "ROWS": max(16, _padded(share)), "D": dim, "HALF": half, "GROUPS": groups,
        "BYTES": half // groups, "BN": chosen.tokens, "MASK": mask is not None, "COUNTED": counted,
        "PTX": PTX, "num_warps": chosen.warps, "num_stages": chosen.stages, "enable_fp_fusion": True,
    }  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: tuple[Tensor, ...], count: Tensor | None, at: int,
        mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        q, k = turned(q, k, turn)
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        if mask is not None:
            mask = (mask if mask.stride(3) == 1 else mask.contiguous()).view(torch.uint8)
        parts = splits or splits_for(pairs, limit if counted else at + 1, chosen, units)
        out = torch.empty(batch, 1, heads, dim, dtype=q.dtype, device=q.device)
        part = torch.empty(batch * heads * parts * (dim + 2), dtype=torch.float32, device=q.device)
        stats = part[batch * heads * parts * dim :]
        _decode_kernel[pairs, parts](
            q, k, v, *cache, q if mask is None else mask, stats if count is None else count, part, stats,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            0 if mask is None or mask.shape[0] == 1 else mask.stride(0), kv_heads, room, at, limit, scale * LOG2E,
            **sizes,
        )  # fmt: skip
        _merge_kernel[(batch * heads,)](
            part, stats, out, count if advance else stats, parts, D=dim, DP=_padded(dim), SPLITS=_padded(parts),
            ADVANCE=advance, PTX=PTX, num_warps=4 if parts <= 32 else 8, enable_fp_fusion=True,
        )  # fmt: skip
        return out

    return run
