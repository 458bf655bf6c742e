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
from quantrot.kernels.attention.one_token import DTYPES, PORTABLE_CLUSTER, aligned, allow_large_clusters
from quantrot.kernels.attention.reference import LOG2E
from quantrot.kernels.nvrtc import load_kernel, processors
from quantrot.kernels.ready import Run

GROUPS = {64: (1,), 128: (1, 2), 256: (2, 4)}  # of a head
LARGEST_SHARE = 8  # query heads of a key head
ENTRY = """extern "C" __global__ void {cluster} __launch_bounds__({threads}, {blocks}) attend_codes(
    const __grid_constant__ quantrot::CodedTokenArgs args) {{
  quantrot::attend_codes<{call}>(args);
}}
"""


@dataclass(frozen=True)
class Plan(one_token.Plan):
    """A launch: also tiles of 32 tokens that each warp has in shared memory."""

    stages: int = 2

    def bytes_of(self, dim: int, share: int, groups: int) -> int:
        """As CodedShape of int4_token.cuh has it."""
        ring = self.warps * self.stages * (32 * (dim + 8 * groups) + 8)
        return self.shared_bytes(dim, share) + ring + dim + 32


class Arguments(ctypes.Structure):
    """CodedTokenArgs of int4_token.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "key", "value", "key_scale", "key_low")),
        *((name, ctypes.c_void_p) for name in ("value_scale", "value_low", "count", "mask", "out")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qkv" for i in ("batch", "head")),
        ("mask_batch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("heads", "groups", "room", "limit", "at", "advance")),
        ("scale", ctypes.c_float),
    ]


class _Parameters(ctypes.Structure):
    _fields_ = [("args", Arguments)]


@lru_cache(maxsize=256)
def plan_for(dim: int, pairs: int, room: int, units: int) -> Plan:
    """The launch for `pairs` key heads of all sequences, with room for `room` tokens each, on `units` processors.

    By a sweep on an H200 (docs/measured/attention.md): a block of 8 warps on each processor, or two where that is too
    few. Clusters of four do not all fit at once: 32 key heads take 23.3 us in eight, 26.1 in four.
    """
    if pairs > units:
        return Plan(4, 1, 4) if room <= 2048 and dim <= 128 else Plan(8, 1, 2 if dim <= 128 else 1)
    split = 1 << min(3, (units // pairs).bit_length() - 1)
    if dim > 128:
        return Plan(8, split)
    if pairs * 2 * PORTABLE_CLUSTER <= units and room > 8192:
        return Plan(16, PORTABLE_CLUSTER)
    return Plan(8, PORTABLE_CLUSTER if split == 4 else split, 2)


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
    return nvrtc.sources("hopper", "products", "attention/one_token", "attention/int4_token")


def entry(plan: Plan, dim: int, share: int, groups: int, dtype: torch.dtype) -> str:
    """The source of one kernel, after device_functions."""
    call = f"{dim}, {groups}, {share}, {plan.warps}, {plan.split}, {plan.stages}, quantrot::{DTYPES[dtype]}"
    cluster = f"__cluster_dims__({plan.split}, 1, 1)" if plan.split > 1 else ""
    return ENTRY.format(cluster=cluster, threads=plan.threads, blocks=plan.blocks, call=call)


@lru_cache(maxsize=256)
def _kernel(plan: Plan, dim: int, share: int, groups: int, dtype: torch.dtype, device: int) -> int:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, dim, share, groups, dtype)
    kernel = load_kernel(source, "attend_codes", plan.bytes_of(dim, share, groups), device)
    return allow_large_clusters(kernel, plan, device)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, ...], count: Tensor | None, at: int, limit: int,
    mask: Tensor | None, scale: float, advance: bool, out: Tensor,
) -> Arguments:  # fmt: skip
    """The kernel's parameter."""
    key, key_scale, key_low, value, value_scale, value_low = cache
    every = q, k, v, key, value, key_scale, key_low, value_scale, value_low, count, mask, out
    return Arguments(
        *(None if t is None else t.data_ptr() for t in every),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
        q.shape[1],
        *key.shape[1:3],
        limit,
        at,
        int(advance),
        scale * LOG2E,
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

    def run(
        q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, ...], count: Tensor | None, at: int, mask: Tensor | None
    ) -> Tensor:
        q, k, v = aligned(q), aligned(k), aligned(v)
        mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
        out = torch.empty(batch, 1, heads, dim, dtype=q.dtype, device=q.device)
        launch(_Parameters(arguments(q, k, v, cache, count, at, limit, mask, scale, advance, out)))
        return out

    return run
