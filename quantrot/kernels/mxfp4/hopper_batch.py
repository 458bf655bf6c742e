"""Some ten to 4096 tokens in e4m3 by a packed MXFP4 weight on Hopper: CUDA C++ (batch.cuh, on kernels/mixed), compiled
at first use.

Order of sums: the tensor core's in float32 along a part of K, times the row's power of two and the token's scale; then
the parts', two by two. A token's bits depend on the plan's parts alone.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import blocks, quantize_fp8_block
from quantrot.kernels.mixed import hopper as mixed
from quantrot.kernels.mixed import hopper_plans as plans
from quantrot.kernels.mxfp4.hopper import aligned
from quantrot.kernels.mxfp4.hopper_prefill import ScaledPlan
from quantrot.kernels.mxfp4.reference import GROUP
from quantrot.kernels.ready import Run, address

WIDE = plans.WIDE
Codes = tuple[Tensor, Tensor, Tensor]  # of tokens: outside, packed, scale
BLOCK = 128  # columns of K that a stage holds, and the granule of K
TABLE = 4096  # bytes of shared memory: see batch.cuh
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap y, const __grid_constant__ quantrot::BatchArgs args) {{
  quantrot::parts<quantrot::Tile<{tile}>, quantrot::BatchOperands<quantrot::{out}>>(&codes, &wide, &y, args);
}}
"""


@dataclass(frozen=True)
class Plan(ScaledPlan):
    """mixed's plan with teams; a block of K is 128 columns: 64 bytes of codes, 128 of a token."""

    halves: bool = False

    def segment(self, depth: int) -> int:
        return super().segment(depth // 2)

    def splits(self, depth: int) -> bool:
        return super().splits(depth // 2)

    def beside(self, depth: int) -> int:
        """Bytes of shared memory for the table and the rows' scales."""
        return TABLE + 64 * self.groups * self.teams * (self.segment(depth) | 1) * 4

    def entry(self, out: torch.dtype, name: str = "mxfp4_batch") -> str:
        """C++ of the kernel `name`."""
        shape = self.groups, self.columns, self.depth, self.split, 1, "false, false", self.teams, self.blocks
        tile = ", ".join(map(str, shape))
        cluster = f"__cluster_dims__({self.split}, 1, 1) " if self.split > 1 else ""
        return ENTRY.format(cluster=cluster, threads=self.threads, name=name, tile=tile, out=WIDE[out])


MOST = 4096  # tokens
MOST_DEPTH = 1 << 17  # no plan has room for the scales of more
# Tiles, and microseconds of a block of K of one (64 to 512 tokens by 4096 x 14336, 8192 x 8192, 28672 x 4096; H200).
TILES = (
    (Plan(64, 2, groups=1), 0.20),
    (Plan(64, 2, groups=2), 0.38),
    (Plan(64, 1, groups=4), 0.72),
    (Plan(96, 2, groups=1), 0.23),
    (Plan(128, 2, groups=1), 0.245),
    (Plan(128, 2, groups=2), 0.47),
    (Plan(128, 1, groups=4), 1.0),
    (Plan(192, 2, groups=1), 0.32),
    (Plan(192, 1, groups=2), 0.60),
    (Plan(256, 1, groups=2), 0.71),
)
STARTING, SPLITTING = 3.5, 1.0  # us, of what a tile does beside its blocks, and of a cluster's exchange
SHALLOW = 1.4  # times as long, with two stages: 1024 tokens by 4096 x 14336 in tiles of 256

FEW = 32
# Tiles of so many tokens, microseconds of one beside its blocks, and of a block of K where all multiprocessors have a
# tile; where few have, up to BUSY less. Of 23 weights of Llama 3 and Qwen2.5 by 16 and 32 tokens (H200) the rule's take
# 0.8% longer than the fastest of these in the mean, and 10% less than what the rule finds in TILES.
FEW_TILES = (
    (Plan(32, 4, groups=1, blocks=2), 2.45, 0.198),
    (Plan(64, 4, groups=1, blocks=2), 2.45, 0.198),  # which a cluster can share
    (Plan(32, 2, groups=1), 2.35, 0.202),
    (Plan(32, 2, groups=2, blocks=2), 2.6, 0.381),
    (Plan(32, 1, groups=4, blocks=2), 5.0, 0.58),
)
FEW_SPLITTING, BUSY = 0.34, 0.47


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return mixed.device_functions() + nvrtc.sources("mxfp4/scales", "mxfp4/batch")


def fits(x: Tensor, rows: int) -> bool:
    """Whether `multiply` takes tokens [M, K] like these and a weight of so many rows."""
    tokens, depth = x.shape
    counts = 0 < tokens <= MOST and 0 < depth <= MOST_DEPTH and rows > 0
    return x.dtype in WIDE and counts and depth % BLOCK == 0 and rows % 8 == 0


def fitted(tile: Plan, depth: int, few: bool) -> list[Plan]:
    """K halved by a cluster or not; where it is too short for the teams, one of them."""
    plans, alone = [replace(tile, split=split) for split in (1, 2)], replace(tile, teams=1)
    if few:
        plans = [plan for plan in plans if plan.splits(depth)] or [alone]
    else:
        plans = [plan if plan.splits(depth) else alone for plan in plans]
    return [plan.fitted(depth) for plan in plans]


@lru_cache(maxsize=4096)
def rule(tokens: int, rows: int, depth: int) -> tuple[float, Plan]:
    """The tiles that take least by the times of their blocks, K halved by a cluster or not, and how long."""
    times: list[tuple[float, Plan]] = []
    few = tokens <= FEW
    for tile, starting, block in FEW_TILES if few else [(tile, STARTING, block) for tile, block in TILES]:
        for plan in fitted(tile, depth, few):
            if plan.stages < 2 or plan.own[0] % (8 if few else 16):
                continue
            each, tiles = plan.segment(depth) * plan.teams * block, plan.grid(rows, tokens, 0)
            turns, splitting = -(-tiles // plans.PROCESSORS), SPLITTING
            if few:
                each *= 1 - BUSY + BUSY * min(1, tiles / plans.PROCESSORS)
                splitting = FEW_SPLITTING
            elif plan.stages < 3:
                each *= SHALLOW
            times.append((turns * (starting + each) + splitting * (plan.split - 1), plan))
    return min(times, key=lambda found: found[0])


def plan_for(tokens: int, rows: int, depth: int) -> Plan:
    return rule(tokens, rows, depth)[1]


def arrange(tokens: Tensor) -> Tensor:
    """e4m3 [M, K] in the order of batch.cuh."""
    count, depth = tokens.shape
    units = tokens.view(torch.int32).view(count, depth // BLOCK, 4, 8)
    return units.transpose(2, 3).contiguous().view(tokens.dtype).view(count, depth)


def quantize(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """x [M, K], K a multiple of BLOCK -> e4m3, arranged, and a float32 scale a token by the rule (Fp8ScaleRule)."""
    return prepare_quantizer(x, rule)(x)


def prepare_quantizer(x: Tensor, rule: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`quantize` of an x like this one."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if not blocks.supports(x, (1, 0)):

        def run_in_two(x: Tensor) -> tuple[Tensor, Tensor]:
            qdata, scale = quantize_fp8_block(x, (1, 0), rule)
            return arrange(qdata), scale.view(-1)

        return run_in_two
    plan, shape, device = replace(blocks.row_plan(x.shape[1]), arranged=True), x.shape, x.device
    if len(x) <= 2 * plans.PROCESSORS:  # they run at once: rather more registers (64 by 4096 x 14336: 18.2 us for 19.0)
        plan = replace(plan, resident=1)
    sizes = torch.empty(shape, device="meta"), torch.empty(len(x), 1, device="meta")
    quantize_x = blocks.prepare(x, *sizes, (1, 0), rule, plan=plan)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(shape[0], dtype=torch.float32, device=device)
        quantize_x(x if x.stride(1) == 1 else x.contiguous(), q, scale)
        return q, scale

    return run


class BatchArgs(mixed.MixedArgs):
    _fields_ = [(name, ctypes.c_void_p) for name in ("packed", "token_scale", "outside", "token_packed", "token_bytes")]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "y")] + [("args", BatchArgs)]


def arguments(
    tokens: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    y: Tensor,
    codes: Codes | None,
    plan: Plan,
    settled: bool,
) -> BatchArgs:
    """The kernel's last parameter."""
    (columns, rows), depth = y.shape, tokens.shape[1]
    outside, token_packed, token_bytes = (t.data_ptr() for t in codes) if codes else (None, None, None)
    return BatchArgs(
        scale=scale.data_ptr(),
        rows=rows,
        columns=columns,
        depth=depth,
        groups=depth // GROUP,
        group_blocks=1,
        segment=plan.segment(depth),
        early=settled,
        token=tokens.data_ptr(),
        packed=packed.data_ptr(),
        token_scale=token_scale.data_ptr(),
        outside=outside,
        token_packed=token_packed,
        token_bytes=token_bytes,
        box=plan.box(columns),
    )


def matrices(packed: Tensor, tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the copy engine moves: of tokens, two as one element of 16 bits."""
    return packed, tokens.view(torch.bfloat16), y


@lru_cache(maxsize=256)
def _kernel(plan: Plan, out: torch.dtype, shared: int, device: int) -> int:
    return nvrtc.load_kernel(device_functions() + plan.entry(out), "mxfp4_batch", shared, device)


def multiply(
    tokens: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    codes: Codes | None = None,
    plan: Plan | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """tokens e4m3 [M, K], arranged, times float32 [M], by a packed weight [N, K/2]: [M, N] in dtype; M up to MOST.

    codes: of tokens that were MXFP4, times powers of two, where they are not in e4m3 as a whole: int32 [M], above zero
    there, packed and scale. settled: no kernel that may still run when this one is launched writes the weight.
    """
    run = prepare(tokens.shape[0], packed, scale, dtype, plan, settled=settled)
    return run(tokens, token_scale, packed, scale, codes)


def prepare(
    count: int, packed: Tensor, scale: Tensor, dtype: torch.dtype, plan: Plan | None = None, *, settled: bool = False
) -> Run:
    """`multiply` of so many tokens by a weight like this one, as a function of tokens, token_scale, packed, scale and
    codes."""
    given = packed, scale
    packed, scale = aligned(packed), aligned(scale)
    settled = settled and packed is given[0] and scale is given[1]
    rows, depth, device = packed.shape[0], packed.shape[1] * 2, packed.get_device()
    plan = plan or plan_for(count, rows, depth)
    made: Any = {"size": (count, rows), "dtype": dtype, "device": packed.device}
    y = torch.empty(made["size"], dtype=dtype, device="meta")
    tokens = torch.empty(count, depth, dtype=torch.float8_e4m3fn, device="meta")
    values = _Arguments(args=arguments(tokens, tokens, packed, scale, y, None, plan, settled))
    boxes = zip(matrices(packed, tokens, y), plan.boxes(count, True), strict=True)
    map_codes, map_wide, map_y = (nvrtc.map_of(t, box) for t, box in boxes)
    grid, shared = (plan.grid(rows, count, nvrtc.processors(device)),), plan.bytes_for(depth)
    launch = nvrtc.Launch(_kernel(plan, dtype, shared, device), grid, plan.threads, shared, device, overlap=True)

    def run(tokens: Tensor, token_scale: Tensor, packed: Tensor, scale: Tensor, codes: Codes | None) -> Tensor:
        packed, scale, y = aligned(packed), aligned(scale), torch.empty(**made)
        now = _Arguments.from_buffer_copy(values)
        args = now.args
        args.scale, args.packed = scale.data_ptr(), packed.data_ptr()
        args.token, args.token_scale = tokens.data_ptr(), token_scale.data_ptr()
        args.outside, args.token_packed, args.token_bytes = map(address, codes or (None, None, None))
        ctypes.memmove(now.codes, map_codes(packed), 128)
        ctypes.memmove(now.wide, map_wide(tokens), 128)
        ctypes.memmove(now.y, map_y(y), 128)
        launch(now)
        return y

    return run
