"""FP8 attention of one query a sequence for Hopper: CUDA C++ (decode.cuh), compiled at first use.

    attention    Inputs -> [B, 1, H, D]
    unsupported  why these operands are not for it, or None

One launch: the keys of a head are split over thread blocks, the last of which to finish adds their sums up. Head
dimensions 64 and 128, up to 16 query heads a key head, a scale a token for k and v, no mask (lengths are).
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import LOG2E, group_of
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.nvrtc import load_kernel, processors

if TYPE_CHECKING:
    from quantrot.kernels.attention.triton import Inputs

OUT = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
DIMS = (64, 128)
STEP = 64  # tokens
ARRIVALS = 1 << 16  # counters of finished blocks, one for each key head of a launch
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {blocks}) decode(
    const __grid_constant__ quantrot::DecodeArgs args) {{
  quantrot::decode<{call}>(args);
}}
"""


@dataclass(frozen=True)
class Plan:
    """A launch: warps of a thread block, and blocks a multiprocessor."""

    warps: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, dim: int, share: int) -> int:
        return self.warps * 8 * rows_for(share) * (dim + 2) * 4 + 16


def plan_for(dim: int) -> Plan:
    """The launch for this head dimension."""
    return Plan(8, 1) if dim == 128 else Plan(8, 2)


def rows_for(share: int) -> int:
    """Query heads of a key head that a thread has: 1 or 2."""
    return -(-share // 8)


class Arguments(ctypes.Structure):
    """DecodeArgs of decode.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "lengths", "out")),
        *((name, ctypes.c_void_p) for name in ("part", "stats", "arrived")),
        *((name, ctypes.c_longlong) for name in ("q_batch", "q_head", "k_batch", "k_head")),
        *((name, ctypes.c_longlong) for name in ("v_batch", "v_head", "v_row")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in ("qs", "ks", "vs") for i in ("batch", "head")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "keys", "splits")),
        ("scale", ctypes.c_float),
    ]


class _Parameters(ctypes.Structure):
    _fields_ = [("args", Arguments)]


def unsupported(given: "Inputs", dtype: torch.dtype) -> str | None:
    """Why `attention` does not take these operands, or None. Does not look at the device."""
    (batch, heads, queries, dim), (groups, keys) = given.q.shape, given.k.shape[1:3]
    if dim not in DIMS or given.q.dtype != E4M3 or dtype not in OUT or heads // groups > 16 or queries != 1:
        return f"head_dim {dim}, {given.q.dtype}, {dtype}, {heads // groups} heads a key head, {queries} queries"
    if given.mask is not None or given.query_lengths is not None:
        return "a mask, or query_lengths"
    if not keys or (group_of(given.k_scale, keys), group_of(given.v_scale, keys)) != (1, 1):
        return "scales of k or v that are not one a token"
    if batch * groups >= min(ARRIVALS, 1 << 16):
        return f"{batch} sequences of {groups} heads"
    if given.k.stride(2) != dim:
        return "rows of k that are not adjacent"
    if any(not _sixteens(t) for t in (given.q, given.k, given.v, given.k_scale, given.v_scale)):
        return "rows that do not start at multiples of 16 bytes"
    if any(_end(t) > t.untyped_storage().nbytes() for t in (given.k_scale, given.v_scale)):
        return "scales behind which there is nothing"
    return None


def _sixteens(t: Tensor) -> bool:
    steps = (s for s, n in zip(t.stride()[:-1], t.shape, strict=False) if n > 1)
    return t.stride(-1) == 1 and all(n % 16 == 0 for n in (*steps, t.data_ptr()))


def _end(scale: Tensor) -> int:
    """Where the last row of scale bytes ends in its storage, in whole sixteens."""
    last = sum((n - 1) * s for n, s in zip(scale.shape[:-1], scale.stride()[:-1], strict=True))
    return int(scale.storage_offset() + last) + -(-scale.shape[-1] // 16) * 16


def supports(given: "Inputs", dtype: torch.dtype) -> bool:
    """Whether `attention` takes these operands on their device."""
    device = given.q.device
    return (
        device.type == "cuda"
        and nvrtc.available(device)
        and unsupported(given, dtype) is None
        and _arrivals(given.q.get_device()) is not None
    )


def device_functions() -> str:
    """What every kernel is built on."""
    here = Path(__file__).parent
    return "".join(path.read_text() for path in (here.parent / "hopper.cuh", here / "codes.cuh", here / "decode.cuh"))


def entry(plan: Plan, dim: int, share: int, out: torch.dtype) -> str:
    """The source of one kernel, after device_functions."""
    call = f"{dim}, {rows_for(share)}, {plan.warps}, quantrot::{OUT[out]}"
    return ENTRY.format(threads=plan.threads, blocks=plan.blocks, call=call)


@lru_cache(maxsize=64)
def _kernel(plan: Plan, dim: int, share: int, out: torch.dtype, device: int) -> Any:
    """The function, ready to launch on this device."""
    return load_kernel(
        device_functions() + entry(plan, dim, share, out), "decode", plan.shared_bytes(dim, share), device
    )


class _Counters:
    """Zeros on a device, which a launch counts up and sets back. Launches take turns, so that two that run at once, or
    two graphs, have their own."""

    def __init__(self, device: int) -> None:
        self.zeros = torch.zeros(ARRIVALS, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        self.next = 0

    def take(self, count: int) -> int:
        """The address of the next `count`."""
        if self.next + count > ARRIVALS:
            self.next = 0
        at, self.next = self.next, self.next + count
        return self.zeros.data_ptr() + 4 * at


_made: dict[int, _Counters] = {}


def _arrivals(device: int) -> _Counters | None:
    """The device's counters; None where they would have to be made within a graph that is being recorded."""
    if device not in _made:
        if torch.cuda.is_current_stream_capturing():
            return None
        _made[device] = _Counters(device)
    return _made[device]


def splits_for(heads: int, keys: int, blocks: int) -> int:
    """Thread blocks that share the keys of one of `heads` heads, where `blocks` run at once: a step each at least."""
    steps = -(-keys // STEP)
    return -(-steps // -(-steps // max(1, min(steps, blocks // heads))))


def arguments(given: "Inputs", out: Tensor, part: Tensor, stats: Tensor, arrived: int, splits: int) -> Arguments:
    """The kernel's parameter."""
    q, k, v = given.q, given.k, given.v
    return Arguments(
        *(t.data_ptr() for t in (q, k, v, given.q_scale, given.k_scale, given.v_scale)),
        given.lengths.data_ptr() if given.lengths is not None else None,
        *(t.data_ptr() for t in (out, part, stats)),
        arrived,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:3],
        *(s for t in (given.q_scale, given.k_scale, given.v_scale) for s in t.stride()[:2]),
        q.shape[1],
        k.shape[1],
        k.shape[2],
        splits,
        given.scale * LOG2E,
    )


def attention(given: "Inputs", dtype: torch.dtype, plan: Plan | None = None, splits: int = 0) -> Tensor:
    """[B, 1, H, D] in `dtype`. plan, splits: instead of the rule's (to measure). ValueError: see unsupported."""
    reason = unsupported(given, dtype)
    if reason:
        raise ValueError(f"{reason}; use another backend")
    (batch, heads, _, dim), (groups, keys), device = given.q.shape, given.k.shape[1:3], given.q.get_device()
    plan, share = plan or plan_for(dim), heads // groups
    splits = splits or splits_for(batch * groups, keys, plan.blocks * processors(device))
    out = torch.empty(batch, 1, heads, dim, dtype=dtype, device=given.q.device)
    if not out.numel():
        return out
    room = torch.empty(batch * heads * splits * (dim + 2), dtype=torch.float32, device=given.q.device)
    part, stats = room[: batch * heads * splits * dim], room[batch * heads * splits * dim :]
    counters = _arrivals(device)
    assert counters is not None
    values = _Parameters(arguments(given, out, part, stats, counters.take(batch * groups), splits))
    shared = plan.shared_bytes(dim, share)
    function = _kernel(plan, dim, share, dtype, device)
    nvrtc.launch(function, (splits, batch * groups), plan.threads, shared, values, device, overlap=True)
    return out
