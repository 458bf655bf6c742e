"""One new token a sequence on its way into an FP8 cache with room: RoPE, a Hadamard rotation, codes, the next place.

    rope_hadamard_append   q, k, v as the projections leave them, the cache -> q's codes; the cache has a token more
    runs_on                whether that is one kernel on a device (CUDA C++ for Hopper, append.cuh)

Contract, with B sequences, H query heads, G key heads, room for L tokens:

    q [B, 1, H, D], k and v [B, 1, G, D] in bfloat16 or float16, D 64 or 128 and contiguous; cos, sin [1 or B, 1, D or
        D / 2] in their dtype or float32, of which the first D / 2 are read, or None: no RoPE
    key [B, G, L, D] and value [B, G, D, L'] (L' >= L) e4m3 as uint8, key_scale and value_scale uint8 [B, G, L], a scale
        a token as quantize_heads has them, all changed: the new token goes to place `length`
    length: how many tokens are in the cache, the same of every sequence; int64 [], read on the device and one more
        afterwards (`advance`), or a number, which the host counts

Codes and scales are rope_hadamard_quantize's with a scale a token. Where the cache is full (`limit` tokens) nothing is
stored, and the query's scale says that it is no number; where the host knows that, it is an error.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.prepare import DIMS, TYPES, aligned
from quantrot.kernels.attention.reference import Granularity, rope_hadamard_quantize_reference
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.nvrtc import load_kernel
from quantrot.kernels.operators import constant, implement, refuse_tangents
from quantrot.kernels.ready import Ready, Run, address, like, same, unseen

HEADS = 8  # of a thread block
MOVING = ("q", "k", "v", "cos", "sin", "q_out", "q_scale", "lengths")  # of the kernel's parameters, from call to call
READY = Ready()
ENTRY = """extern "C" __global__ void __launch_bounds__(32) append(const __grid_constant__ quantrot::AppendArgs args) {{
  quantrot::append<{call}>(args);
}}
"""

torch.library.define(
    "quantrot::rope_hadamard_append",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? signs, int order, Tensor(a!) key, "
    "Tensor(b!) key_scale, Tensor(c!) value, Tensor(d!) value_scale, Tensor? position, Tensor(e!)? length, SymInt at, "
    "SymInt limit) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)


def rope_hadamard_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    key: Tensor,
    key_scale: Tensor,
    value: Tensor,
    value_scale: Tensor,
    length: Tensor | int,
    *,
    limit: int,
    order: int = 0,
    signs: Tensor | None = None,
    advance: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q's codes e4m3 [B, H, 1, D], their scales uint8 [B, H, 1], tokens with the new one int32 [B]); see the top of
    this file. order: of the Hadamard matrix, D, or 0 for no rotation. signs: +-1 int8 [D], multiplies what the matrix
    multiplies.

    advance: a length on the device becomes one more. Not to be asked for, under torch.compile, of a length from which
    operands of this or a later call are computed: see rope_attend_one. No backward. ValueError for shapes and dtypes
    that do not fit, and for a number that is no place below the limit.
    """
    if reason := unsupported(q, k, v, cos, sin, key, key_scale, value, value_scale, length, order, signs):
        raise ValueError(f"rope_hadamard_append: {reason}")
    refuse_tangents(q, k, v, cos, sin)
    _check_place(length, limit, key.shape[2])
    place: tuple[Tensor | None, Tensor | None, int]  # a length to read, one to count, a number
    if isinstance(length, Tensor):
        place = (None, length, 0) if advance else (length, None, 0)
    else:
        place = None, None, length
    cache = key, key_scale, value, value_scale
    codes, *rest = torch.ops.quantrot.rope_hadamard_append(q, k, v, cos, sin, signs, order, *cache, *place, limit)
    return codes.view(E4M3), *rest


def try_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, key: Tensor, key_scale: Tensor,
    value: Tensor, value_scale: Tensor, length: Tensor | int, *, limit: int, order: int, signs: Tensor | None,
    advance: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """rope_hadamard_append, in eager mode found again; None where the operands do not fit."""
    _check_place(length, limit, key.shape[2])
    known, cache, moving = None, (key, key_scale, value, value_scale), (q, k, v, cos, sin)
    tokens, at = (length, 0) if isinstance(length, Tensor) else (None, length)
    if q.is_cuda and q.numel() and unseen(*moving, signs, tokens, *cache):
        known = *map(like, (*moving, signs)), *map(same, (*cache, tokens)), limit, order, advance
        if again := READY.find(known):
            codes, scale, lengths = again(*moving, signs, at)
            return codes.view(E4M3), scale, lengths
    if unsupported(*moving, *cache, length, order, signs):
        return None
    if not known:
        how: Any = {"limit": limit, "order": order, "signs": signs, "advance": advance}
        return rope_hadamard_append(*moving, *cache, length, **how)
    run = prepare(*moving, signs, order, *cache, length, advance, limit)
    codes, scale, lengths = READY.keep(known, run, q.get_device())(*moving, signs, at)
    return codes.view(E4M3), scale, lengths


def _check_place(length: Tensor | int, limit: int, room: int) -> None:
    if not 0 < limit <= room:
        raise ValueError(f"rope_hadamard_append: limit {limit}; allowed: 1 to {room}, the cache's room")
    if not isinstance(length, Tensor) and not 0 <= length < limit:
        raise ValueError(f"rope_hadamard_append: length {length}; allowed: 0 to {limit - 1}, the limit is {limit}")


@constant
def runs_on(device: torch.device) -> bool:
    """Whether rope_hadamard_append is one kernel on this device; elsewhere it is plain torch, of no use but to
    compare."""
    return device.type == "cuda" and torch.version.hip is None and nvrtc.available(device)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, key: Tensor, key_scale: Tensor,
    value: Tensor, value_scale: Tensor, length: Tensor | int, order: int, signs: Tensor | None,
) -> str | None:  # fmt: skip
    """Why these are not operands of rope_hadamard_append, or None."""
    if any(t.dim() != 4 for t in (q, k, v, key, value)) or q.dtype not in (torch.bfloat16, torch.float16):
        return f"q {tuple(q.shape)}, {q.dtype}; [B, 1, H, D] in bfloat16 or float16 is needed"
    (batch, tokens, _, dim), (groups, room) = q.shape, key.shape[1:3]
    if tokens != 1 or dim not in DIMS or k.shape != (batch, 1, groups, dim) or v.shape != k.shape:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; one token, head_dim in {DIMS}"
    if order not in (0, dim):
        return f"order {order}; allowed: 0, {dim}"
    if signs is not None and (not order or signs.shape != (dim,) or signs.dtype != torch.int8):
        return f"signs {signs.dtype} {tuple(signs.shape)}, order {order}; int8 [{dim}] and a rotation are needed"
    if k.dtype != q.dtype or v.dtype != q.dtype or (cos is None) != (sin is None):
        return f"q {q.dtype}, k {k.dtype}, v {v.dtype}, cos {cos is not None}, sin {sin is not None}"
    for angles in (cos, sin):
        if angles is not None and (
            angles.shape not in [(n, 1, d) for n in (1, batch) for d in (dim, dim // 2)]
            or angles.dtype not in (q.dtype, torch.float32)
        ):
            return f"cos or sin {angles.dtype} {tuple(angles.shape)}; [1 or {batch}, 1, {dim} or {dim // 2}] is needed"
    if cos is not None and sin is not None and (cos.dtype, cos.stride()) != (sin.dtype, sin.stride()):
        return "cosines and sines of two dtypes or layouts"
    if key.shape != (batch, groups, room, dim) or value.shape[:3] != (batch, groups, dim) or value.shape[3] < room:
        return f"key {tuple(key.shape)}, value {tuple(value.shape)}; [B, G, L, D] and [B, G, D, L] are needed"
    if any(t.shape != (batch, groups, room) for t in (key_scale, value_scale)):
        return f"scales {tuple(key_scale.shape)}, {tuple(value_scale.shape)}; {(batch, groups, room)} is needed"
    if any(t.dtype != torch.uint8 for t in (key, key_scale, value, value_scale)):
        return f"a cache in {key.dtype}; uint8, of e4m3 and its scales, is needed"
    if any(t.stride(-1) != 1 for t in (key, key_scale, value, value_scale)) or key.stride(2) != dim:
        return "a cache whose tokens are not adjacent"
    if any(n % 16 for n in key.stride()[:2]):
        return "keys that do not start at multiples of 16 bytes"
    if isinstance(length, Tensor) and (length.dtype != torch.int64 or length.dim()):
        return f"length {length.dtype} {tuple(length.shape)}; an int64 without dimensions, or a number, is needed"
    others = (k, v, cos, sin, signs, key, key_scale, value, value_scale, length)
    if any(isinstance(t, Tensor) and t.device != q.device for t in others):
        return f"operands on several devices, q on {q.device}"
    return None


# --- Plain torch -----------------------------------------------------------------------------------------------------


def rope_hadamard_append_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, length: Tensor | int, advance: bool,
    limit: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition. Any device."""
    counted, length = advance and isinstance(length, Tensor), torch.as_tensor(length, device=q.device)
    made = rope_hadamard_quantize_reference(q, k, v, cos, sin, signs, order, Granularity.token, E4M3)
    codes, scale, *new = (t.view(torch.uint8) for t in made)
    here = torch.arange(value.shape[3], device=q.device) == torch.where(length < limit, length, -1)
    room = here[: key.shape[2]]
    key.copy_(torch.where(room[:, None], new[0], key))
    key_scale.copy_(torch.where(room, new[1], key_scale))
    value.copy_(torch.where(here, new[2][..., :1], value))
    value_scale.copy_(torch.where(room, new[3], value_scale))
    scale = torch.where(length < limit, scale, 255)
    lengths = (length + 1).to(torch.int32).expand(q.shape[0]).contiguous()
    if counted:
        length.add_(1)
    return codes, scale, lengths


# --- The kernel ------------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """AppendArgs of append.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "signs", "q_out", "q_scale")),
        *((name, ctypes.c_void_p) for name in ("key", "key_scale", "value", "value_scale", "count", "lengths")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qkv" for i in ("batch", "head")),
        ("cos_batch", ctypes.c_longlong),
        *((f"{name}_{i}", ctypes.c_longlong) for name in ("key", "key_scale") for i in ("batch", "head")),
        *((f"value_{i}", ctypes.c_longlong) for i in ("batch", "head", "column")),
        *((f"value_scale_{i}", ctypes.c_longlong) for i in ("batch", "head")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "at", "limit", "advance")),
        ("factor", ctypes.c_float),
    ]


def device_functions() -> str:
    """What every kernel is built on."""
    return nvrtc.sources("hopper", "products", "attention/codes", "attention/prepare", "attention/append")


def entry(dim: int, dtype: torch.dtype, angles: torch.dtype | None, rotate: bool) -> str:
    """The source of one kernel, after device_functions."""
    types = (f"quantrot::{TYPES[t]}" for t in (dtype, angles or dtype))
    return ENTRY.format(call=", ".join([*types, str(dim), str(int(angles is not None)), str(int(rotate))]))


@lru_cache(maxsize=64)
def _kernel(dim: int, dtype: torch.dtype, angles: torch.dtype | None, rotate: bool, device: int) -> int:
    """The function, ready to launch on this device."""
    return load_kernel(device_functions() + entry(dim, dtype, angles, rotate), "append", 0, device)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, length: Tensor | int, advance: bool,
    limit: int, out: tuple[Tensor, Tensor, Tensor],
) -> Arguments:  # fmt: skip
    """The kernel's parameter. out: q's codes, their scales, lengths."""
    codes, scale, lengths = out
    count, at = (length, 0) if isinstance(length, Tensor) else (None, length)
    every = (q, k, v, cos, sin, signs, codes, scale, key, key_scale, value, value_scale, count, lengths)
    return Arguments(
        *(None if t is None else t.data_ptr() for t in every),
        *(stride for t in (q, k, v) for stride in (t.stride(0), t.stride(2))),
        cos.stride(0) if cos is not None and cos.shape[0] > 1 else 0,
        *key.stride()[:2],
        *key_scale.stride()[:2],
        *value.stride()[:3],
        *value_scale.stride()[:2],
        q.shape[2],
        k.shape[2],
        at,
        limit,
        int(advance and count is not None),
        order**-0.5 if order else 1.0,
    )


def grid(batch: int, heads: int, groups: int) -> tuple[int, int]:
    return -(-heads // HEADS) + 2 * -(-groups // HEADS), batch


def prepare(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, place: Tensor | int, advance: bool, limit: int,
) -> Run:  # fmt: skip
    """The kernel on operands like these, as a function of q, k, v, cos, sin, signs and, of a number, the place."""
    (batch, _, heads, dim), groups, device = q.shape, k.shape[2], q.get_device()
    if key.data_ptr() % 16:  # of which Dynamo knows nothing
        raise ValueError("rope_hadamard_append: keys that do not start at a multiple of 16 bytes")
    cache, sizes = (key, key_scale, value, value_scale), ((batch, heads, 1, dim), (batch, heads, 1), (batch,))
    dtypes, on = (torch.uint8, torch.uint8, torch.int32), q.device
    made = tuple(torch.empty(size, device="meta") for size in sizes)
    read: Any = (*_read_where_they_lie(q, k, v, cos, sin), signs, order, *cache, place, advance, limit, made)
    values = arguments(*read)
    function = _kernel(dim, q.dtype, None if cos is None else cos.dtype, order > 0, device)
    launch = nvrtc.Launch(function, grid(batch, heads, groups), 32, 0, device, overlap=True)

    def run(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, at: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        now, moving = Arguments.from_buffer_copy(values), _read_where_they_lie(q, k, v, cos, sin)
        codes, scale, lengths = (torch.empty(n, dtype=t, device=on) for n, t in zip(sizes, dtypes, strict=True))
        for name, t in zip(MOVING, (*moving, codes, scale, lengths), strict=True):
            setattr(now, name, None if t is None else t.data_ptr())
        if signs is not None and not (signs.is_contiguous() and signs.data_ptr() % 8 == 0):
            signs = signs.clone(memory_format=torch.contiguous_format)
        now.signs, now.at = address(signs), at
        launch(now)
        return codes, scale, lengths

    return run


def _read_where_they_lie(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Any:
    """The same, copied where the kernel cannot read them."""
    plain = torch.contiguous_format
    q, k, v = (t if aligned(t) else t.clone(memory_format=plain) for t in (q, k, v))
    if cos is not None and sin is not None and not (aligned(cos) and aligned(sin)):
        cos, sin = cos.clone(memory_format=plain), sin.clone(memory_format=plain)
    return q, k, v, cos, sin


@implement("quantrot::rope_hadamard_append")
def _rope_hadamard_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, position: Tensor | None,
    length: Tensor | None, at: int, limit: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = position if length is None else length
    place = at if tokens is None else tokens
    given = q, k, v, cos, sin, signs, order, key, key_scale, value, value_scale, place, length is not None, limit
    if q.is_cuda and runs_on(q.device) and q.numel():
        return prepare(*given)(q, k, v, cos, sin, signs, at)
    return rope_hadamard_append_reference(*given)


@torch.library.register_fake("quantrot::rope_hadamard_append")
def _rope_hadamard_append_fake(q: Tensor, *given: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, heads, dim = q.shape
    return (
        q.new_empty(batch, heads, 1, dim, dtype=torch.uint8),
        q.new_empty(batch, heads, 1, dtype=torch.uint8),
        q.new_empty(batch, dtype=torch.int32),
    )
