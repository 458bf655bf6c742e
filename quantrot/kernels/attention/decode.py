"""FP8 attention of one query a sequence for Hopper: CUDA C++ (decode.cuh), compiled at first use, one launch.

    attention    Inputs -> [B, 1, H, D]
    unsupported  why these operands are not for it, or None

Head dimensions 64 and 128, up to 16 query heads a key head, a scale a token for k and v.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import BLOCK, LOG2E, Inputs, group_of, span
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.nvrtc import SM_SHARED, load_kernel, processors, tensor_map
from quantrot.kernels.ready import Run

OUT = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
DIMS = (64, 128)
LARGEST_SHARE = 16  # query heads a key head
THREADS = 192  # a warpgroup that multiplies, a warp that loads, one that arranges the end
TILE = 1 << 14  # bytes of K, and of V
ROW = 128  # bytes of K, two tokens at head_dim 64, that the copy engine reads as one
MOVING = ("q", "q_scale", "mask", "lengths", "out", "parts")  # of the kernel's parameters, from call to call
PROMOTION = 128  # V's rows are read 128 bytes at a time (with 256: 4 to 16 % slower)
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {blocks}) decode(
    const __grid_constant__ quantrot::TensorMap k, const __grid_constant__ quantrot::TensorMap v,
    const __grid_constant__ quantrot::DecodeArgs args) {{
  quantrot::decode<{call}>(&k, &v, args);
}}
"""


@dataclass(frozen=True)
class Plan:
    """A launch: tiles of K and V that a thread block has in shared memory, blocks of a key head."""

    stages: int
    splits: int
    alone: bool = False  # no two blocks on a processor

    def shared_bytes(self, dim: int, share: int) -> int:
        """As DecodeShape of decode.cuh has it; alone: at least half of what a processor has."""
        heads, keys = -(-share // 8) * 8, TILE // dim
        used = self.stages * (2 * TILE + 3 * keys + 24) + heads * (keys + 16 + dim) + 24 * 128
        return max(used, SM_SHARED // 2) if self.alone else used


class Arguments(ctypes.Structure):
    """DecodeArgs of decode.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "q_scale", "k_scale", "v_scale", "lengths")),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("out", "parts")),
        ("counter", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("q_batch", "q_head")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in ("qs", "ks", "vs") for i in ("batch", "head")),
        ("mask_batch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("k_batch", "k_head", "v_batch", "v_head", "heads", "groups", "keys")),
        ("scale", ctypes.c_float),
    ]


class _Parameters(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_ubyte * 128) for name in "kv"), ("args", Arguments)]


@lru_cache(maxsize=256)
def plan_for(pairs: int, units: int) -> Plan:
    """The launch for `pairs` key heads of all sequences on `units` processors: a block on each, or two where less than
    two thirds would have one (9 sequences of 8192 tokens, head_dim 64: 23.0 us for 26.6). More heads than processors: a
    block each.

    Where there was room for a second one, the next launch's lay down in pairs where this one's had ended first, and
    from then on 128 blocks had 80 to 120 processors, in one process and not in another: 20.8 us for 17.9 (32768 tokens,
    head_dim 128). So each is alone if four fifths have one; with 96 blocks of 132 the next launch's take the others.
    """
    splits = max(1, units // pairs)
    if 3 * pairs * splits < 2 * units:
        splits = 2 * units // pairs
    return Plan(3, splits, alone=4 * units <= 5 * pairs * splits <= 5 * units)


def unsupported(given: Inputs, dtype: torch.dtype) -> str | None:
    """Why `attention` does not take these operands, or None. Does not look at the device."""
    (batch, heads, queries, dim), (groups, keys) = given.q.shape, given.k.shape[1:3]
    if dim not in DIMS or dtype not in OUT or given.q.dtype != E4M3:
        return f"head_dim {dim}, {dtype}, q in {given.q.dtype}; head_dim 64 and 128, 16-bit results and codes are"
    if queries != 1 or given.query_lengths is not None or not keys:
        return "several queries, or no keys"
    if heads // groups > LARGEST_SHARE or batch * groups > 65535:
        return f"{heads} query heads and {groups} key heads, {batch} sequences"
    if group_of(given.k_scale, keys) != 1 or group_of(given.v_scale, keys) != 1:
        return "a scale of k or v for more than a token"
    if given.k.stride(2) != dim or any(s % given.v.stride(2) for s in given.v.stride()[:2]):
        return "rows of k that are not adjacent, or heads of v between rows"
    if any(s % ROW for s in given.k.stride()[:2]) or given.k.shape.numel() >= 1 << 31:
        return "heads of k that do not start at rows of 128 bytes, or too many"
    if left(given.k) < span(given.k) + -span(given.k) % ROW:
        return "keys that end within a row of 128 bytes"
    lines = [given.k_scale, given.v_scale, *([given.mask] if given.mask is not None else [])]
    if any(_crooked(t) for t in (given.q, given.k, given.v, *lines)):
        return "rows that are not contiguous, or do not start at multiples of 16 bytes"
    if any(left(t) < span(t) + -keys % 16 for t in lines):
        return "scales or a mask that end within 16 bytes"
    return None


def _crooked(t: Tensor) -> bool:
    """Whether rows of bytes have gaps, or start elsewhere than at multiples of 16."""
    starts = (t.data_ptr(), *(s for s, n in zip(t.stride()[:-1], t.shape, strict=False) if n > 1))
    return t.stride(-1) != 1 or any(n % 16 for n in starts)


def left(t: Tensor) -> int:
    """Bytes of its storage from the first on."""
    return int(t.untyped_storage().nbytes()) - int(t.storage_offset())


def supports(given: Inputs, dtype: torch.dtype) -> bool:
    """Whether `attention` takes these operands on their device."""
    device = given.q.device
    return device.type == "cuda" and nvrtc.available(device) and unsupported(given, dtype) is None


def device_functions() -> str:
    """What every kernel is built on."""
    files = ("hopper", "products", "attention/codes", "attention/gather", "attention/decode")
    return nvrtc.IN_TURN.declaration + nvrtc.sources(*files)


def entry(plan: Plan, dim: int, share: int, mask: bool, dtype: torch.dtype) -> str:
    """The source of one kernel, after device_functions."""
    numbers = (dim, share, plan.stages, int(mask))
    call = ", ".join([*map(str, numbers), f"quantrot::{OUT[dtype]}"])
    # Registers are given to 8 warps where there are 6, so that two blocks of more than 128 are not beside each other.
    return ENTRY.format(threads=256, blocks=2 if share <= 8 else 1, call=call)


@lru_cache(maxsize=256)
def _kernel(plan: Plan, dim: int, share: int, mask: bool, dtype: torch.dtype, device: int) -> int:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, dim, share, mask, dtype)
    return load_kernel(source, "decode", plan.shared_bytes(dim, share), device)


def arguments(given: Inputs, out: Tensor, parts: Tensor, counter: int) -> Arguments:
    """The kernel's parameter."""
    q, k, v = given.q, given.k, given.v
    scales = (given.q_scale, given.k_scale, given.v_scale)
    return Arguments(
        *(t.data_ptr() for t in (q, *scales)),
        *(t.data_ptr() if t is not None else None for t in (given.lengths, given.mask)),
        *(t.data_ptr() for t in (out, parts)),
        counter,
        *q.stride()[:2],
        *(stride for t in scales for stride in t.stride()[:2]),
        given.mask.stride(0) if given.mask is not None and given.mask.shape[0] > 1 else 0,
        *(s // ROW for s in k.stride()[:2]),
        *(s // v.stride(2) for s in v.stride()[:2]),
        q.shape[1],
        k.shape[1],
        k.shape[2],
        given.scale * LOG2E,
    )


def matrices(given: Inputs) -> list[tuple[int, int, int, int, tuple[int, int], int]]:
    """k and v as the copy engine reads them: address, rows, columns, bytes from a row to the next, a box, its swizzle.

    Of k all rows that its storage has: so a cache that grows into its room keeps its matrix.
    """
    k, v, dim = given.k, given.v, given.k.shape[3]
    return [
        (k.data_ptr(), left(k) // ROW, ROW, ROW, (BLOCK, ROW), ROW),
        (v.data_ptr(), -(-span(v) // v.stride(2)), v.shape[3], v.stride(2), (dim, BLOCK), BLOCK),
    ]


def scratch(given: Inputs, plan: Plan) -> Tensor:
    """Room for what blocks leave: sums, and what they weigh."""
    batch, heads, _, dim = given.q.shape
    return torch.empty(batch * heads * plan.splits * (dim + 4), dtype=torch.float32, device=given.q.device)


def attention(given: Inputs, dtype: torch.dtype, plan: Plan | None = None) -> Tensor:
    """[B, 1, H, D] in `dtype`, contiguous. plan: instead of the rule's (to measure). ValueError: see unsupported."""
    if reason := unsupported(given, dtype):
        raise ValueError(f"{reason}; use another backend")
    if not given.q.numel():
        return torch.empty(given.q.shape[0], 1, *given.q.shape[1::2], dtype=dtype, device=given.q.device)
    return prepare(given, dtype, plan)(given.q, given.q_scale, given.mask, given.lengths)


def prepare(given: Inputs, dtype: torch.dtype, plan: Plan | None = None) -> Run:
    """`attention` of operands like these, as a function of q, its scales, mask and lengths."""
    (batch, heads, _, dim), groups, device = given.q.shape, given.k.shape[1], given.q.get_device()
    share, made = heads // groups, ((batch, 1, heads, dim), dtype, given.q.device)
    chosen = plan or plan_for(batch * groups, processors(device))
    shared = chosen.shared_bytes(dim, share)
    function = _kernel(chosen, dim, share, given.mask is not None, dtype, device)
    room = scratch(given, chosen).shape
    nowhere = torch.empty(0, device="meta")
    values = _Parameters(args=arguments(given, nowhere, nowhere, 0))
    for field, (at, rows, columns, pitch, box, swizzle) in zip("kv", matrices(given), strict=True):
        encoded = tensor_map(at, rows, columns, pitch, box, torch.uint8, swizzle, PROMOTION)
        ctypes.memmove(getattr(values, field), encoded, 128)
    launch = nvrtc.Launch(function, (chosen.splits, batch * groups), THREADS, shared, device, overlap=True)

    def run(q: Tensor, q_scale: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
        out = torch.empty(made[0], dtype=made[1], device=made[2])
        parts, now = torch.empty(room, dtype=torch.float32, device=made[2]), _Parameters.from_buffer_copy(values)
        for name, t in zip(MOVING, (q, q_scale, mask, lengths, out, parts), strict=True):
            setattr(now.args, name, None if t is None else t.data_ptr())
        now.args.counter = nvrtc.counters_in_turn(batch * groups)
        launch(now)
        return out

    return run
