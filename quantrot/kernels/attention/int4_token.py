"""Attention of one new token a sequence with an INT4 KV cache, which is read in its codes.

    int4_attend_one   q, k, v, RoPE's angles, the cache -> [B, 1, H, D]; the cache has a token more
    runs_on           whether that is a kernel on a device: CUDA C++ on Hopper (int4_hopper.py), Triton (int4_triton.py)

Contract, with B sequences, H query heads, G key heads (G divides H), room for L tokens:

    q [B, H, 1, D], k and v [B, G, 1, D] in bfloat16 or float16; q and k go through a Turn (reference.py): RoPE, each
        operation rounded to the dtype, and a Hadamard matrix, sums in float32 and rounded
    cache codes uint8 [B, G, L, D / 2], scales and lows bfloat16 [B, G, L, D / group] of keys, then of values, as
        quantize_int4 has them, contiguous, all changed: the new token goes to place `length`
    length: how many tokens are in the cache, the same of every sequence; int64 [], read on the device and one more
        afterwards (`advance`), or a number, which the host counts
    mask bool [1 or B, 1, 1, T] or None: False where a token is not seen; T > length, or `limit` where the device counts

The cached tokens and the new one are what dequantize_int4 makes of their codes in q's dtype; but the kernels round
less. Triton's rounds those of the cache to bfloat16 once, without float32 in between, and where a low is less than some
2^-24 of a number, its last bit may be another; Hopper's takes code * scale + low as it is, in float32. Softmax and sums
are float32, its weights rounded to the dtype for the product with values (on Hopper weight * scale, to float16's 11
bits). A query that sees nothing gets 0; where the cache is full (`limit` tokens), the output is NaN and nothing is
stored; where the host knows that, it is an error.
"""

from types import ModuleType

import torch
from torch import Tensor

from quantrot.kernels.attention import int4_hopper
from quantrot.kernels.attention.one_token import rotate_half
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.int4 import dequantize_int4, quantize_int4
from quantrot.kernels.operators import constant, has_triton, implement, number, refuse_tangents
from quantrot.kernels.ready import Ready, like, unseen

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
GROUPS = (1, 2, 4)  # of a head, whose scales are one load
LARGEST_SHARE = 64  # query heads of a key head
NO_TURN = Turn()
READY = Ready()

torch.library.define(
    "quantrot::int4_attend_one",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, int order, Tensor? signs, Tensor(a!) key, "
    "Tensor(b!) key_scale, Tensor(c!) key_low, Tensor(d!) value, Tensor(e!) value_scale, Tensor(f!) value_low, "
    "Tensor? position, Tensor(g!)? length, SymInt at, SymInt limit, Tensor? mask, float scale) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def int4_attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Tensor, ...],
    length: Tensor | int,
    *,
    limit: int,
    turn: Turn = NO_TURN,
    mask: Tensor | None = None,
    scale: float | None = None,
    advance: bool = True,
) -> Tensor:
    """[B, 1, H, D] in q's dtype, contiguous; see the top of this file. turn: of q and k, by default none. scale: of the
    scores, 1 / sqrt(D) if None.

    advance: a length on the device becomes one more. Not to be asked for, under torch.compile, of a length from which
    operands of this or a later call are computed: see rope_attend_one. No backward. ValueError for shapes and dtypes
    that do not fit, and for a number that is no place below the limit.
    """
    if reason := unsupported(q, k, v, turn, cache, length, limit, mask):
        raise ValueError(f"int4_attend_one: {reason}")
    refuse_tangents(q, k, v, turn.cos, turn.sin)
    scale = q.shape[3] ** -0.5 if scale is None else number("scale", scale, "positive, finite")
    place: tuple[Tensor | None, Tensor | None, int]  # a length to read, one to count, a number
    if isinstance(length, Tensor):
        place = (None, length, 0) if advance else (length, None, 0)
    else:
        place = None, None, length
    return torch.ops.quantrot.int4_attend_one(q, k, v, *turn, *cache, *place, limit, mask, scale)


def try_attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Tensor, ...],
    length: Tensor | int,
    *,
    limit: int,
    turn: Turn,
    mask: Tensor | None,
    scale: float,
    advance: bool,
) -> Tensor | None:
    """int4_attend_one, or None for operands that it does not take; a call like one before is not checked again."""
    known, counted = None, isinstance(length, Tensor)
    count, at = (length, 0) if isinstance(length, Tensor) else (None, length)
    if q.is_cuda and unseen(q, k, v, turn.cos, turn.sin, turn.signs, *cache, count, mask):
        enough = mask is None or mask.shape[-1] >= (limit if counted else at + 1)  # it is longer in every call
        rows = None if mask is None else (mask.shape[:-1], mask.dtype, mask.device)
        if enough and (counted or 0 <= at < limit):
            moving = q, k, v, turn.cos, turn.sin, turn.signs, *cache, count
            known = *map(like, moving), turn.order, rows, limit, scale, advance
            if again := READY.find(known):
                return again(q, k, v, turn, cache, count, at, mask)
    if unsupported(q, k, v, turn, cache, length, limit, mask):
        return None
    if not known or not runs_on(q.device):
        return int4_attend_one(q, k, v, cache, length, limit=limit, turn=turn, mask=mask, scale=scale, advance=advance)
    run = _backend(q, cache).prepare(q, cache, counted, advance and counted, limit, mask, scale)
    return READY.keep(known, run, q.get_device())(q, k, v, turn, cache, count, at, mask)


@constant
def runs_on(device: torch.device) -> bool:
    """Whether int4_attend_one reads codes on this device; elsewhere it dequantizes all of them."""
    able = device.type == "cuda" and torch.version.hip is None and has_triton()
    return able and torch.cuda.get_device_capability(device) >= (8, 0)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: tuple[Tensor, ...], length: Tensor | int, limit: int,
    mask: Tensor | None,
) -> str | None:  # fmt: skip
    """Why these are not operands of int4_attend_one, or None."""
    key, key_scale, *_ = cache
    if any(t.dim() != 4 for t in (q, k, v, *cache)) or q.dtype not in DTYPES:
        return f"q {tuple(q.shape)}, {q.dtype}; [B, H, 1, D] in bfloat16 or float16 is needed"
    (batch, heads, tokens, dim), (kv_heads, room), groups = q.shape, key.shape[1:3], key_scale.shape[3]
    if tokens != 1 or dim % 2 or not 16 <= dim <= LARGEST_HEAD or not batch:
        return f"q {tuple(q.shape)}; one token, an even head_dim from 16 to {LARGEST_HEAD} are needed"
    if k.shape != (batch, kv_heads, 1, dim) or v.shape != k.shape or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)}; q's dtype, [{batch}, {kv_heads}, 1, {dim}]"
    angles = turn.cos, turn.sin
    if (turn.cos is None) != (turn.sin is None) or any(
        t is not None and (t.dtype != q.dtype or t.shape not in ((1, 1, dim), (batch, 1, dim))) for t in angles
    ):
        kinds = ", ".join("None" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in angles)
        return f"cos and sin {kinds}; None, or q's dtype, [1 or {batch}, 1, {dim}]"
    if turn.order not in (0, dim):
        return f"order {turn.order}; allowed: 0, {dim}"
    if turn.signs is not None and (not turn.order or turn.signs.shape != (dim,) or turn.signs.dtype != torch.int8):
        found = f"signs {turn.signs.dtype} {tuple(turn.signs.shape)}, order {turn.order}"
        return f"{found}; int8 [{dim}] and a matrix of order {dim} are needed"
    if not kv_heads or heads % kv_heads or heads // kv_heads > LARGEST_SHARE or batch * kv_heads > 1 << 20:
        return f"{heads} query heads, {kv_heads} key heads; up to {LARGEST_SHARE} of the first for each of the second"
    if groups not in GROUPS or (groups > 1 and dim & (dim - 1)):
        return f"{groups} groups of {dim} columns; 1, or of a power of two 2 or 4"
    for codes, *steps in (cache[:3], cache[3:]):
        if codes.shape != (batch, kv_heads, room, dim // 2) or codes.dtype != torch.uint8:
            return f"codes {codes.dtype} {tuple(codes.shape)}; uint8 [{batch}, {kv_heads}, {room}, {dim // 2}]"
        if any(t.shape != (batch, kv_heads, room, groups) or t.dtype != torch.bfloat16 for t in steps):
            return f"scales or lows that are no bfloat16 [{batch}, {kv_heads}, {room}, {groups}]"
    if not all(t.is_contiguous() for t in cache) or room * dim >= 1 << 31:
        return f"a cache of {tuple(key.shape)} that is too large, or not contiguous"
    counted = isinstance(length, Tensor)
    if not 0 < limit <= room or (not counted and not 0 <= length < limit):
        return f"length {length}, limit {limit}, room {room}; each is below the next, limit may be room"
    if isinstance(length, Tensor) and (length.dtype != torch.int64 or length.dim()):
        return f"length {length.dtype} {tuple(length.shape)}; an int64 without dimensions, or a number, is needed"
    if mask is not None and (
        mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[:3] not in ((1, 1, 1), (batch, 1, 1))
        or mask.shape[3] < (limit if isinstance(length, Tensor) else length + 1)
    ):
        return f"mask {mask.dtype} {tuple(mask.shape)}; bool [1 or {batch}, 1, 1, all tokens] is needed"
    if any(isinstance(t, Tensor) and t.device != q.device for t in (k, v, *turn, *cache, length, mask)):
        return f"operands on several devices, q on {q.device}"
    return None


# --- Plain torch -----------------------------------------------------------------------------------------------------


def turned(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, 1, D] behind RoPE and the rotation."""
    if turn.cos is not None and turn.sin is not None:
        cos, sin = turn.cos.unsqueeze(1), turn.sin.unsqueeze(1)
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
    if turn.order:
        q, k = (hadamard_transform(t, order=turn.order, signs=turn.signs) for t in (q, k))
    return q, k


def int4_attend_one_reference(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: tuple[Tensor, ...], length: Tensor | int, advance: bool,
    limit: int, mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """The definition: the token is turned, quantized and stored, all are dequantized, and torch attends to them."""
    q, k = turned(q, k, turn)
    batch, dim, room = len(q), q.shape[3], cache[0].shape[2]
    group, counted = dim // cache[1].shape[3], advance and isinstance(length, Tensor)
    length = torch.as_tensor(length, device=q.device)
    at = torch.arange(room, device=q.device)
    here = (at == torch.where(length < limit, length, -1)).view(room, 1)
    for buffer, part in zip(cache, (*quantize_int4(k, group), *quantize_int4(v, group)), strict=True):
        buffer.copy_(torch.where(here, part, buffer))
    seen = at <= length
    if mask is not None:
        seen = seen & torch.nn.functional.pad(mask, (0, room))[..., :room]
    seen = seen.expand(batch, 1, 1, room)
    hidden = ~seen.transpose(2, 3)  # where a NaN would stay one
    parts = (cache[0], cache[1], cache[2]), (cache[3], cache[4], cache[5])
    key, value = (dequantize_int4(*part, q.dtype).masked_fill(hidden, 0) for part in parts)
    y = torch.nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    y = y.masked_fill(~seen.any(-1, keepdim=True), 0)
    y = torch.where(length < limit, y, torch.nan).to(q.dtype)
    if counted:
        length.add_(1)
    return y.transpose(1, 2).contiguous()


# --- The operator ----------------------------------------------------------------------------------------------------


def _backend(q: Tensor, cache: tuple[Tensor, ...]) -> ModuleType:
    """The module that has these operands' kernel."""
    if int4_hopper.supports(q, cache):
        return int4_hopper
    from quantrot.kernels.attention import int4_triton

    return int4_triton


@implement("quantrot::int4_attend_one")
def _int4_attend_one(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, order: int, signs: Tensor | None,
    key: Tensor, key_scale: Tensor, key_low: Tensor, value: Tensor, value_scale: Tensor, value_low: Tensor,
    position: Tensor | None, length: Tensor | None, at: int, limit: int, mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    turn = Turn(cos, sin, order, signs)
    cache = key, key_scale, key_low, value, value_scale, value_low
    count = position if length is None else length
    if q.is_cuda and runs_on(q.device):
        run = _backend(q, cache).prepare(q, cache, count is not None, length is not None, limit, mask, scale)
        return run(q, k, v, turn, cache, count, at, mask)
    place = at if count is None else count
    return int4_attend_one_reference(q, k, v, turn, cache, place, length is not None, limit, mask, scale)


@torch.library.register_fake("quantrot::int4_attend_one")
def _int4_attend_one_fake(q: Tensor, *given: object) -> Tensor:
    batch, heads, _, dim = q.shape
    return q.new_empty(batch, 1, heads, dim)
