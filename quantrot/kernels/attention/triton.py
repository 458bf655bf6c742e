"""FP8 attention in Triton: prefill (flash attention forward) and decode (one query token, keys split over programs).

Both run the reference's arithmetic tile by tile. The running maximum is rounded up to a whole power of two, so that a
probability's e4m3 code does not depend on the tiling, and rescaling is exact. V is stored [head_dim, tokens]: Hopper's
e4m3 products want both operands contiguous along the summed dimension.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.attention.reference import LEAST, P_BITS, Inputs, group_of
from quantrot.kernels.nvrtc import processors

P = tl.constexpr(P_BITS)
SMALLEST = tl.constexpr(LEAST)
LOG2E = 1.4426950408889634
PTX = torch.version.hip is None and not triton.knobs.runtime.interpret  # neither AMD nor the interpreter has PTX


@dataclass(frozen=True)
class Config:
    """A launch: rows of queries and of keys a program holds, warps, tiles in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


# --- Pieces of both kernels ------------------------------------------------------------------------------------------


@triton.jit
def _power(byte):
    """A byte -> 2^(byte - 127) as float32, NaN for 255. int8's scales are float32 already."""
    if byte.dtype == tl.float32:
        return byte
    byte = byte.to(tl.int32)
    return tl.where(byte == 255, float("nan"), (byte << 23).to(tl.float32, bitcast=True))


@triton.jit
def _bytes(pointer, stride, token, valid, GROUP: tl.constexpr):
    """The scales of these tokens, bytes as int32: GROUP tokens share one, 0: all."""
    if GROUP == 0:
        found = tl.load(pointer)
    else:
        found = tl.load(pointer + token // GROUP * stride, mask=valid, other=0)
    return found.to(tl.int32) if pointer.dtype.element_ty == tl.uint8 else found


@triton.jit
def _down(byte, unit):
    """2^(byte - unit) for byte <= unit, NaN for 255. Below 2^-31 a probability's code is zero whatever it is."""
    return tl.where(
        byte == 255, float("nan"), ((tl.maximum(byte - unit, -32) + 127) << 23).to(tl.float32, bitcast=True)
    )


@triton.jit
def _known(byte):
    """A byte that the unit may follow: 0 where it stands for NaN."""
    return tl.where(byte == 255, 0, byte)


@triton.jit
def to_e4m3(x, PTX: tl.constexpr):
    """float32, |x| <= 448, to the nearest e4m3, ties to even. The interpreter only converts exact values rightly."""
    if not PTX:
        bits = x.to(tl.int32, bitcast=True)
        magic = (((tl.maximum((bits >> 23) & 255, 121) + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = (tl.abs(x) + magic) - magic  # magic is 1.5 * 2^23 steps
        x = (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def rounded(x, PTX: tl.constexpr):
    """float32, |x| <= 448, as the e4m3 that is nearest to it."""
    return to_e4m3(x, PTX).to(tl.float32)


@triton.jit
def magnitude(x):
    """The bits of |x|, float32: NaN is above infinity, which is above all else."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(largest):
    """reference.scale_byte."""
    byte = ((largest + 0x1FFFFF) >> 23) - 8
    byte = tl.minimum(tl.maximum(byte, 1), 254)
    byte = tl.where(largest == 0, 127, byte)
    return tl.where(largest >= 0x7F800000, 255, byte)


@triton.jit
def scaled(x, byte):
    """x in units of scale bytes that broadcast with it; 0 where the byte is 255."""
    inverse = ((254 - tl.minimum(byte, 254)) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, 0.0, x * inverse)


@triton.jit
def encode(x, byte, PTX: tl.constexpr):
    """x by scale bytes that broadcast with it -> e4m3; 0 where the byte is 255. |x| <= 448 scales: nothing to clamp."""
    return to_e4m3(scaled(x, byte), PTX)


@triton.jit
def step(largest):
    """reference.step."""
    value = tl.maximum(largest.to(tl.float32, bitcast=True), SMALLEST) * (1 / 127)
    return tl.where(largest >= 0x7F800000, float("nan"), value)


@triton.jit
def whole(x, scale):
    """x by scales that broadcast with it -> int8, to nearest, ties to even; 0 where the scale is NaN. No fused sums."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    magic = 12582912.0  # 1.5 * 2^23
    return ((tl.where(scale != scale, 0.0, x * inverse) + magic) - magic).to(tl.int8)


@triton.jit
def _held(x, PTX: tl.constexpr):
    """x, as a use of it here. Without one a product that is only used in the next iteration stays in flight across
    its start, and ptxas then waits after every single wgmma."""
    if PTX:
        return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


# --- Prefill ---------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(
    acc, total, top, unit, q, rows, positions, k_at, v_at, ks_at, vs_at, mask_at, k_row, ks_row, vs_row, start, keys, d,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One tile of BN keys from `start` on. acc [BM, DP]: sums in units of 2^(unit - 127) * 2^-P; total [BM]; top [BM]:
    the running maximum in bits. EDGE: some of the tile's keys may be out of sight of some queries."""
    n = start + tl.arange(0, BN)
    inside = n < keys
    at = n if K_GROUP == 1 else start
    k_bytes = _bytes(ks_at, ks_row, at, at < keys, K_GROUP)
    at = n if V_GROUP == 1 else start
    v_bytes = _bytes(vs_at, vs_row, at, at < keys, V_GROUP)
    if EDGE:
        k = tl.load(k_at + start * k_row, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif D == DP:
        k = tl.load(k_at + start * k_row)
    else:
        k = tl.load(k_at + start * k_row, mask=(d < D)[None, :], other=0.0)
    s = tl.dot(q, tl.trans(k)).to(tl.float32)
    if K_GROUP == 1:
        s = s * _power(k_bytes)[None, :]
        by = rows
    else:
        by = rows * _power(k_bytes)
    if EDGE:
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (n[None, :] <= positions[:, None])
        if MASK:
            asked = inside[None, :] & (positions >= 0)[:, None]
            visible = visible & (tl.load(mask_at + start, mask=asked, other=0) != 0)
        s = tl.where(visible, s, float("-inf"))
    now = tl.maximum(top, tl.ceil(tl.max(s, 1) * by))
    base = now
    if EDGE:
        base = tl.where(now == float("-inf"), 0.0, now)
    shrink = tl.exp2(top - base)
    if V_GROUP == 1:
        new = tl.maximum(unit, tl.max(_known(v_bytes), 0))
        p = tl.exp2(s * by[:, None] - (base - P)[:, None])
        total = total * shrink + tl.sum(rounded(p, PTX), 1)
        p = p * _down(v_bytes, new)[None, :]
        if EDGE:
            p = tl.where(visible, p, 0.0)  # a scale that is NaN stays out of rows that do not see it
    else:
        new = tl.maximum(unit, _known(v_bytes))
        less = tl.where(v_bytes == 255, float("nan"), tl.maximum(v_bytes - new, -32).to(tl.float32))
        p = tl.exp2(s * by[:, None] - (base - P - less)[:, None])
        if EDGE:
            p = tl.where(visible, p, 0.0)
        more = tl.where(v_bytes == 255, 1.0, tl.exp2(-less))  # 0 NaN would be NaN
        total = total * shrink + tl.sum(rounded(p * more, PTX), 1)
    shrink = shrink * _down(unit, new)
    if D == DP:
        v = tl.load(v_at + start)
    else:
        v = tl.load(v_at + start, mask=(d < D)[:, None], other=0.0)
    acc = tl.dot(to_e4m3(p, PTX), tl.trans(v), acc * shrink[:, None])
    return _held(acc, PTX), total, now, new


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, qs_ptr, ks_ptr, vs_ptr, mask_ptr, lengths_ptr, query_lengths_ptr, out_ptr, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, qs_batch, qs_head, qs_row, ks_batch,
    ks_head, ks_row, vs_batch, vs_head, vs_row, mask_batch, mask_row, heads, queries, keys,
    GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, Q_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    kv = head // GROUPS
    used = tl.minimum(tl.load(lengths_ptr + batch), keys) if LENGTHS else keys
    asked = tl.minimum(tl.load(query_lengths_ptr + batch), queries) if QUERY_LENGTHS else queries
    offset = used - asked
    m = block * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    live = m < asked
    q_at = q_ptr + batch * q_batch + head * q_head + m[:, None].to(tl.int64) * q_row + d[None, :]
    scale_at = qs_ptr + batch * qs_batch + head * qs_head + (m // Q_GROUP * qs_row if Q_GROUP else m * 0)
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    rows = _power(tl.load(scale_at, mask=live, other=1)) * scale
    rows = tl.where(live, rows, 1.0)  # -inf times 0 would be NaN
    positions = tl.where(live, tl.maximum(offset + m, -1), -1)
    k_at = k_ptr + batch * k_batch + kv * k_head + n[:, None] * k_row + d[None, :]
    v_at = v_ptr + batch * v_batch + kv * v_head + d[:, None].to(tl.int64) * v_row + n[None, :]
    ks_at = ks_ptr + batch * ks_batch + kv * ks_head
    vs_at = vs_ptr + batch * vs_batch + kv * vs_head
    mask_at = mask_ptr + batch * mask_batch + m[:, None].to(tl.int64) * mask_row + n[None, :]

    end = used
    whole = used // BN * BN
    if CAUSAL:
        end = tl.minimum(used, tl.maximum(offset + (block + 1) * BM, 0))
        whole = tl.minimum(whole, tl.maximum(offset + block * BM + 1, 0) // BN * BN)
    if MASK:
        whole = 0
    if QUERY_LENGTHS:
        end = tl.where(block * BM < asked, end, 0)
        whole = tl.where(block * BM < asked, whole, 0)
    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    unit = tl.full([], 0, tl.int32)
    for start in tl.range(0, whole, BN):
        acc, total, top, unit = _tile(
            acc, total, top, unit, q, rows, positions, k_at, v_at, ks_at, vs_at, mask_at, k_row, ks_row, vs_row, start,
            used, d, D, DP, BN, K_GROUP, V_GROUP, CAUSAL, MASK, False, PTX,
        )  # fmt: skip
    for start in tl.range(whole, end, BN):
        acc, total, top, unit = _tile(
            acc, total, top, unit, q, rows, positions, k_at, v_at, ks_at, vs_at, mask_at, k_row, ks_row, vs_row, start,
            used, d, D, DP, BN, K_GROUP, V_GROUP, CAUSAL, MASK, True, PTX,
        )  # fmt: skip
    inverse = tl.where(total == 0.0, 0.0, _power(unit) / total)
    row = (batch * queries + m[:, None]) * heads + head
    y = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d[None, :], y, mask=(m < queries)[:, None] & (d < D)[None, :])


# --- Decode ----------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, qs_ptr, ks_ptr, vs_ptr, mask_ptr, lengths_ptr, part_ptr, stats_ptr, scale,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, qs_batch, qs_head, ks_batch, ks_head, ks_row,
    vs_batch, vs_head, vs_row, mask_batch, kv_heads, keys,
    GROUPS: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, MASK: tl.constexpr, LENGTHS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Products are transposed, keys [BN, DP] by queries [DP, GP] and values [DP, BN] by probabilities [BN, GP]: the
    few query heads of a key's head are the short side of the tensor core's tile, and K and V go through it whole."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv = (tl.program_id(0) % kv_heads).to(tl.int64)
    used = tl.minimum(tl.load(lengths_ptr + batch), keys) if LENGTHS else keys
    tiles = tl.cdiv(used, BN)
    share = tl.cdiv(tiles, splits)
    first = tl.minimum(split * share, tiles) * BN
    last = tl.minimum((split + 1) * share, tiles) * BN
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    live = g < GROUPS
    head = kv * GROUPS + g
    q_at = q_ptr + batch * q_batch + head[:, None] * q_head + d[None, :]
    scale_at = qs_ptr + batch * qs_batch + head * qs_head
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    rows = _power(tl.load(scale_at, mask=live, other=1)) * scale
    k_at = k_ptr + batch * k_batch + kv * k_head + d[None, :]
    v_at = v_ptr + batch * v_batch + kv * v_head + d[:, None].to(tl.int64) * v_row + n[None, :]
    ks_at = ks_ptr + batch * ks_batch + kv * ks_head
    vs_at = vs_ptr + batch * vs_batch + kv * vs_head
    mask_at = mask_ptr + batch * mask_batch

    acc = tl.zeros([DP, GP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], float("-inf"), tl.float32)
    unit = tl.full([], 0, tl.int32)
    # A byte load is too narrow for an asynchronous copy: the scales are fetched one tile ahead by hand.
    k_bytes = _bytes(ks_at, ks_row, first + n, first + n < used, K_GROUP)
    v_bytes = _bytes(vs_at, vs_row, first + n, first + n < used, V_GROUP)
    for start in tl.range(first, last, BN):
        token = start + n
        visible = token < used
        if MASK:
            visible = visible & (tl.load(mask_at + token, mask=visible, other=0) != 0)
        ahead = token + BN
        k_next = _bytes(ks_at, ks_row, ahead, ahead < used, K_GROUP)
        v_next = _bytes(vs_at, vs_row, ahead, ahead < used, V_GROUP)
        k = tl.load(
            k_at + token[:, None].to(tl.int64) * k_row, mask=(token < keys)[:, None] & (d < D)[None, :], other=0.0
        )
        s = tl.dot(k, tl.trans(q)).to(tl.float32)
        if K_GROUP == 0:
            s = s * (rows * _power(k_bytes))[None, :]
        else:
            s = s * _power(k_bytes)[:, None] * rows[None, :]
        s = tl.where(visible[:, None], s, float("-inf"))
        now = tl.maximum(top, tl.ceil(tl.max(s, 0)))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - (base - P)[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(rounded(p, PTX), 0)
        if V_GROUP == 0:
            new = tl.maximum(unit, _known(v_bytes))
            p = p * _down(v_bytes, new)
        else:
            new = tl.maximum(unit, tl.max(_known(v_bytes), 0))
            p = p * _down(v_bytes, new)[:, None]
        p = tl.where(visible[:, None], p, 0.0)
        shrink = shrink * _down(unit, new)
        v = tl.load(v_at + start, mask=(d < D)[:, None], other=0.0)
        acc = _held(tl.dot(v, to_e4m3(p, PTX), acc * shrink[None, :]), PTX)
        top, unit, k_bytes, v_bytes = now, new, k_next, v_next
    at = ((batch * kv_heads * GROUPS + head) * splits + split).to(tl.int64)
    tl.store(part_ptr + at[None, :] * D + d[:, None], acc * _power(unit), mask=live[None, :] & (d < D)[:, None])
    tl.store(stats_ptr + at * 2, top, mask=live)
    tl.store(stats_ptr + at * 2 + 1, total, mask=live)


@triton.jit
def _combine_kernel(
    part_ptr, stats_ptr, out_ptr, splits, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """One query head: the splits' sums, always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    at = row * splits + i
    top = tl.load(stats_ptr + at * 2, mask=i < splits, other=float("-inf"))
    total = tl.load(stats_ptr + at * 2 + 1, mask=i < splits, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=(i < splits)[:, None] & (d < D)[None, :], other=0.0)
    total = tl.sum(total * weight, 0)
    y = tl.sum(part * weight[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


# --- Launches --------------------------------------------------------------------------------------------------------


def prefill_config(head_dim: int, crowded: bool) -> Config:
    """The prefill kernel's launch. crowded: a mask, or a scale a token, which take registers."""
    if head_dim > 128:
        return Config(128, 64, 8, 2)
    if crowded:
        return Config(64, 64, 4, 3)
    return Config(128, 128, 8, 3) if head_dim <= 64 else Config(64, 128, 4, 3)


def decode_config(head_dim: int) -> Config:
    """The decode kernel's launch; `queries` is not used."""
    return Config(16, 128 if head_dim <= 128 else 64, 4, 3)


def splits_for(programs: int, tiles: int, device: torch.device) -> int:
    """How many programs share the keys of one head: two programs a multiprocessor, a tile each at least."""
    return max(1, min(tiles, -(-2 * processors(device.index if device.type == "cuda" else -1) // programs)))


def attention(given: Inputs, dtype: torch.dtype, config: Config | None = None) -> Tensor:
    """[B, S, H, D] in `dtype`, contiguous."""
    batch, heads, queries, dim = given.q.shape
    out = torch.empty(batch, queries, heads, dim, dtype=dtype, device=given.q.device)
    if out.numel() and queries == 1 and given.query_lengths is None:
        _decode(given, out, config or decode_config(dim))
    elif out.numel():
        _prefill(given, out, config)
    return out


def _mask(given: Inputs) -> Tensor | None:
    """uint8 [B, 1, S, T], broadcast."""
    if given.mask is None:
        return None
    return given.mask.view(torch.uint8).expand(given.q.shape[0], 1, given.q.shape[2], given.k.shape[2])


def _padded(dim: int) -> int:
    return max(32, triton.next_power_of_2(dim))  # an e4m3 product sums 32 at a time


def _prefill(given: Inputs, out: Tensor, config: Config | None) -> None:
    q, k, v, mask = given.q, given.k, given.v, _mask(given)
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    k_group, v_group = group_of(given.k_scale, keys), group_of(given.v_scale, keys)
    config = config or prefill_config(dim, mask is not None or 1 in (k_group, v_group))
    unread = given.q_scale
    _prefill_kernel[batch * heads, triton.cdiv(queries, config.queries)](
        q, k, v, given.q_scale, given.k_scale, given.v_scale, unread if mask is None else mask,
        unread if given.lengths is None else given.lengths,
        unread if given.query_lengths is None else given.query_lengths, out, given.scale * LOG2E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *given.q_scale.stride(), *given.k_scale.stride(),
        *given.v_scale.stride(), *((0, 0) if mask is None else (mask.stride(0), mask.stride(2))), heads, queries, keys,
        GROUPS=heads // k.shape[1], D=dim, DP=_padded(dim), BM=config.queries, BN=config.keys,
        Q_GROUP=group_of(given.q_scale, queries), K_GROUP=k_group, V_GROUP=v_group, CAUSAL=given.causal,
        MASK=mask is not None, LENGTHS=given.lengths is not None, QUERY_LENGTHS=given.query_lengths is not None,
        PTX=PTX, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def _decode(given: Inputs, out: Tensor, config: Config) -> None:
    q, k, v, mask = given.q, given.k, given.v, _mask(given)
    batch, heads, _, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    splits = splits_for(batch * kv_heads, max(1, triton.cdiv(keys, config.keys)), q.device)
    part = torch.empty(batch * heads, splits, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch * heads, splits, 2, dtype=torch.float32, device=q.device)
    unread = given.q_scale
    _decode_kernel[batch * kv_heads, splits](
        q, k, v, given.q_scale, given.k_scale, given.v_scale, unread if mask is None else mask,
        unread if given.lengths is None else given.lengths, part, stats, given.scale * LOG2E,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *given.q_scale.stride()[:2], *given.k_scale.stride(),
        *given.v_scale.stride(), 0 if mask is None else mask.stride(0), kv_heads, keys,
        GROUPS=heads // kv_heads, GP=max(16, triton.next_power_of_2(heads // kv_heads)), D=dim,
        DP=max(64, _padded(dim)), BN=config.keys, K_GROUP=group_of(given.k_scale, keys),
        V_GROUP=group_of(given.v_scale, keys), MASK=mask is not None, LENGTHS=given.lengths is not None,
        PTX=PTX, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    _combine_kernel[(batch * heads,)](
        part, stats, out, splits, D=dim, DP=_padded(dim), SPLITS=triton.next_power_of_2(splits), num_warps=4
    )
