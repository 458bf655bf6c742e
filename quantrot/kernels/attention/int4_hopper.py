"""int4_token's kernel for Hopper: CUDA C++ (int4_token.cuh), compiled at first use, one launch.

    prepare      operands -> their attention, as a function of what is another in every call
    unsupported  why these operands are not for it, or None

Head dimensions 64, 128 and 256 in groups of 64 or 128 columns, up to 8 query heads a key head.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention import one_token
from quantrot.kernels.attention.one_token import DTYPES, aligned
from quantrot.kernels.attention.reference import LOG2E, Turn
from quantrot.kernels.nvrtc import load_kernel, processors
from quantrot.kernels.ready import Run

GROUPS = {64: (1,), 128: (1, 2), 256: (2, 4)}  # of a head
LARGEST_SHARE = 8  # query heads of a key head
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {blocks}) attend_codes(
    const __grid_constant__ quantrot::CodedTokenArgs args) {{
  quantrot::attend_codes<{call}>(args);
}}
"""


@dataclass(frozen=True)
class Plan:
    """A launch: warps of a thread block, blocks of a key head, blocks a multiprocessor has room for, tiles of 32 tokens
    that each warp has in shared memory."""

    warps: int
    split: int
    blocks: int = 1
    stages: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def bytes_of(self, dim: int, share: int, groups: int) -> int:
        """As CodedShape of int4_token.cuh has it."""
        ring = self.warps * self.stages * (32 * (dim + 8 * groups) + 8)
        new = one_token.Plan(self.warps, 1).shared_bytes(dim, share) + ring + dim + 32
        return -(-new // 16) * 16 + share * (2 * dim + 16)


class Arguments(ctypes.Structure):
    """CodedTokenArgs of int4_token.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "signs")),
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_scale", "key_low")),
        *((name, ctypes.c_void_p) for name in ("value_scale", "value_low", "count", "mask", "out", "parts")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qkv" for i in ("batch", "head")),
        *((f"{name}_batch", ctypes.c_longlong) for name in ("cos", "sin", "mask")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "room", "limit", "at", "advance", "counter")),
        *((name, ctypes.c_float) for name in ("scale", "factor")),
    ]


@lru_cache(maxsize=256)
def plan_for(dim: int, pairs: int, room: int, units: int) -> Plan:
    """The launch for `pairs` key heads of all sequences, with room for `room` tokens each, on `units` processors.

    By a sweep on an H200 (docs/measured/attention.md): a block of 8 warps on each processor, or two where less than two
    thirds would have one (10 sequences of 4096 tokens 24.7 us for 27.1). Where a head has several blocks, registers for
    two on a processor cost 0.2 to 0.4 us.
    """
    if pairs > units:
        return Plan(4, 1, 4) if room <= 2048 and dim <= 128 else Plan(8, 1, 2 if dim <= 128 else 1)
    split = units // pairs
    few = 3 * pairs * split < 2 * units
    if dim <= 128 and (few or split == 1):
        return Plan(8, 2 * units // pairs if few else 1, 2)
    return Plan(8, split)


def unsupported(q: Tensor, cache: tuple[Tensor, ...]) -> str | None:
    """Why these operands of int4_attend_one are not for this kernel, or None. Does not look at the device."""
    (batch, heads, _, dim), kv_heads, groups = q.shape, cache[0].shape[1], cache[1].shape[3]
    if groups not in GROUPS.get(dim, ()) or heads // kv_heads > LARGEST_SHARE:
        return f"head_dim {dim} in {groups} groups, {heads // kv_heads} query heads a key head"
    if batch * kv_heads > 65535:
        return f"{batch} sequences of {kv_heads} key heads"
    if any(t.data_ptr() % 16 or t.shape[2:].numel() * t.itemsize % 16 for t in cache):
        return f"a cache, or heads of it with room for {cache[0].shape[2]} tokens, that do not start at 16 bytes"
    return None


def supports(q: Tensor, cache: tuple[Tensor, ...]) -> bool:
    """Whether these operands of int4_attend_one are for this kernel on their device."""
    return q.is_cuda and nvrtc.available(q.device) and unsupported(q, cache) is None


def device_functions() -> str:
    """What every kernel is built on."""
    files = ("hopper", "products", "attention/gather", "attention/one_token", "attention/turn", "attention/int4_token")
    return nvrtc.IN_TURN.declaration + nvrtc.sources(*files)


def entry(plan: Plan, dim: int, share: int, groups: int, dtype: torch.dtype) -> str:
    """The source of one kernel, after device_functions."""
    call = f"{dim}, {groups}, {share}, {plan.warps}, {plan.stages}, quantrot::{DTYPES[dtype]}"
    return ENTRY.format(threads=plan.threads, blocks=plan.blocks, call=call)


@lru_cache(maxsize=256)
def _kernel(plan: Plan, dim: int, share: int, groups: int, dtype: torch.dtype, device: int) -> int:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, dim, share, groups, dtype)
    return load_kernel(source, "attend_codes", plan.bytes_of(dim, share, groups), device)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: tuple[Tensor, ...], count: Tensor | None, at: int, limit: int,
    mask: Tensor | None, scale: float, advance: bool, out: Tensor, parts: Tensor | None, counter: int,
) -> Arguments:  # fmt: skip
    """The kernel's parameter."""
    key, key_scale, key_low, value, value_scale, value_low = cache
    new = q, k, v, turn.cos, turn.sin, turn.signs
    every = *new, key, value, key_scale, key_low, value_scale, value_low, count, mask, out, parts
    return Arguments(
        *(None if t is None else t.data_ptr() for t in every),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        *(t.stride(0) if t is not None and t.shape[0] > 1 else 0 for t in (turn.cos, turn.sin, mask)),
        q.shape[1],
        *key.shape[1:3],
        limit,
        at,
        int(advance),
        counter,
        scale * LOG2E,
        turn.order**-0.5 if turn.order else 0.0,
    )


def prepare(
    q: Tensor, cache: tuple[Tensor, ...], counted: bool, advance: bool, limit: int, mask: Tensor | None, scale: float,
    plan: Plan | None = None,
) -> Run:  # fmt: skip
    """As int4_triton's. plan: instead of the rule's (to measure)."""
    (batch, heads, _, dim), (kv_heads, room), groups = q.shape, cache[0].shape[1:3], cache[1].shape[3]
    share, pairs, device = heads // kv_heads, batch * kv_heads, q.get_device()
    chosen = plan or plan_for(dim, pairs, room, processors(device))
    function = _kernel(chosen, dim, share, groups, q.dtype, device)
    shared, grid = chosen.bytes_of(dim, share, groups), (chosen.split, pairs)
    launch = nvrtc.Launch(function, grid, chosen.threads, shared, device, overlap=True)
    parts_of = pairs * share * chosen.split * (dim + 4)

    def run(
        q: Tensor, k: Tensor, v: Tensor, turn: Turn, cache: tuple[Tensor, ...], count: Tensor | None, at: int,
        mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        q, k, v, turn = aligned(q), aligned(k), aligned(v), turn.each(aligned)
        mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
        out = torch.empty(batch, 1, heads, dim, dtype=q.dtype, device=q.device)
        parts = None if chosen.split == 1 else torch.empty(parts_of, dtype=torch.float32, device=q.device)
        counter = 0 if parts is None else nvrtc.counters_in_turn(pairs)
        rest = limit, mask, scale, advance, out, parts, counter
        launch(arguments(q, k, v, turn, cache, count, at, *rest))
        return out

    return run
