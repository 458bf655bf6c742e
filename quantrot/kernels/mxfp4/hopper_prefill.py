"""Bfloat16 tokens by a packed MXFP4 weight on Hopper: CUDA C++ (prefill.cuh, on kernels/mixed), compiled at use.

All of K, or of a part of it as the plan says, is summed by the tensor cores in float32, in order; the parts are added
two by two, and the sum is rounded once. A token's bits depend on the plan's parts alone.
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import hopper as mixed
from quantrot.kernels.mixed import hopper_plans as plans
from quantrot.kernels.mxfp4.hopper import aligned
from quantrot.kernels.mxfp4.reference import GROUP
from quantrot.kernels.ready import Run

ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap y, const __grid_constant__ quantrot::MixedArgs args) {{
  quantrot::{function}<quantrot::PackedTile<{shape}>, quantrot::PackedOperands>(&codes, &wide, &y, args);
}}
"""


@dataclass(frozen=True)
class ScaledPlan(plans.Plan, ABC):
    """mixed's plan with something beside the stages in shared memory."""

    @abstractmethod
    def beside(self, depth: int) -> int:
        """Bytes of it, for so many columns of K."""

    def fitted(self, depth: int) -> Self:
        """The same with as many stages as fit."""
        room = plans.MAX_SHARED - self._output() - self.beside(depth)
        return replace(self, stages=min(12, room // self._stage() // self.teams))

    def bytes_for(self, depth: int) -> int:
        return self.shared_bytes() + self.beside(depth)


@dataclass(frozen=True)
class Plan(ScaledPlan):
    """The same tiles, of half the bytes of codes; four warpgroups that multiply take two blocks at a time."""

    def _stage(self) -> int:
        return self.blocks * (self.rows * plans.BLOCK // 2 + self.columns * 128) + 16

    def boxes(self, columns: int, weight: bool = True) -> tuple[plans.Box, ...]:
        _, *rest = super().boxes(columns, weight)
        line = self.blocks * plans.BLOCK // 2
        return (self.rows, line, line), *rest

    def beside(self, depth: int) -> int:
        """Bytes of shared memory for the rows' scales."""
        return 64 * self.groups * self.teams * (self.segment(depth) // 2 | 1) * 4 if self.blocks > 1 else 0


def entry(plan: Plan, name: str = "mxfp4_prefill") -> str:
    """C++ of the kernel `name`."""
    flags = (str(flag).lower() for flag in (plan.odd, plan.halves))
    shape = plan.groups, plan.columns, plan.depth, plan.split, plan.share, *flags, max(plan.teams, 1), plan.blocks
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else "",
        threads=plan.threads,
        name=name,
        function="parts" if plan.teams else "prefill",
        shape=", ".join(map(str, shape)),
    )


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return mixed.device_functions() + nvrtc.sources("mxfp4/scales", "mxfp4/prefill")


def fits(x: Tensor, rows: int) -> bool:
    """Whether `multiply` takes these tokens [M, K] and a weight of so many rows."""
    return x.dtype == torch.bfloat16 and x.numel() > 0 and x.shape[1] % plans.BLOCK == 0 and rows > 0 and rows % 8 == 0


WIDTHS = (64, 96, 128, 160, 192, 224, 240, 256)  # columns of a tile
SOME = 64  # tokens, up to which no tile is wider
# Plans for fewer tiles than multiprocessors; cycles a block of 64 columns of K of all teams, and of all else. The model
# is of the same loops with codes of a byte (kernels/mixed).
PARTS = (
    (plans.Plan(128, 2, groups=1, halves=False), 729, 3800),
    (plans.Plan(128, 2, 2, groups=1), 729, 7200),
    (plans.Plan(128, 1, 2, groups=3, halves=False), 972, 7000),
    (plans.Plan(128, 1, groups=3, halves=False), 972, 2700),
    *((plans.Plan(w, 1, 2, halves=w > 128), 351 + 2.87 * w, 7000 + 11.4 * w) for w in WIDTHS if w % 32 == 0),
)


def prefill_cycles(plan: plans.Plan, rows: int, tokens: int, depth: int) -> float:
    """The model's time of persistent thread blocks."""
    block = 570 if plan.columns == SOME else 330 + 2.87 * plan.columns + (21 if plan.share == 1 else 0)
    turns = -(-plan.tiles(rows, tokens) // (plans.PROCESSORS // plan.cluster))
    return turns * (depth / plans.BLOCK * block + 11.4 * plan.columns) + 1000


# Tiles by stages of more than one block, which hold all tokens, and microseconds of 128 columns of K of one (32 to 128
# tokens by 4096 x 14336, 8192 x 8192, 28672 x 4096, 4096 x 4096; H200).
DEEP = (
    (Plan(64, 2, groups=1, blocks=4), 0.285),
    (Plan(64, 2, groups=2, blocks=2), 0.58),
    (Plan(64, 1, groups=4, blocks=4), 1.09),
    (Plan(96, 2, groups=1, blocks=2), 0.355),
    (Plan(96, 1, groups=2, blocks=4), 0.69),
    (Plan(96, 1, groups=4, blocks=2), 1.35),
    (Plan(128, 1, groups=2, blocks=4), 0.79),
    (Plan(128, 1, groups=4, blocks=2), 1.68),
)
STARTING, SPLITTING = 3.5, 1.0  # us, of what a tile does beside its blocks, and of a cluster's exchange
CYCLES = 1600  # of the other model in a microsecond


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, depth: int) -> Plan:
    """The plan that takes least by the models: prefill_cycles and PARTS, or DEEP.

    64 tokens by 4096 x 4096 took 17.9 us in boxes of 128, 128 tokens 11.7.
    """
    share = 2 if rows > 128 else 1
    times: list[tuple[float, plans.Plan]] = []
    for width in WIDTHS:
        if width <= SOME or tokens > SOME:
            plan = plans.Plan(width, share=share, odd=-(-rows // 128) % share > 0, halves=width > 64)
            times.append((prefill_cycles(plan, rows, tokens, depth), plan))
    for plan, block, rest in PARTS:
        taken = (plan.columns <= SOME or tokens > SOME) and plan.splits(depth)
        if taken and plan.tiles(rows, tokens) <= plans.PROCESSORS // plan.cluster:
            times.append((depth / plan.parts / plans.BLOCK * block + rest, plan))
    shallow, plan = min(times, key=lambda found: found[0])
    both = [(shallow, Plan(**vars(plan))), *_deep(tokens, rows, depth)]
    return min(both, key=lambda found: found[0])[1]


def _deep(tokens: int, rows: int, depth: int) -> list[tuple[float, Plan]]:
    """The plans of DEEP that take these operands, and their cycles."""
    times = []
    for tile, block in DEEP:
        for split in (1, 2):
            plan = replace(tile, split=split)
            fits = tokens <= plan.columns and depth % (2 * plans.BLOCK) == 0 and plan.splits(depth)
            plan = plan.fitted(depth)
            if fits and plan.stages >= 2:
                turns = -(-plan.grid(rows, tokens, 0) // plans.PROCESSORS)
                us = turns * (STARTING + plan.segment(depth) * plan.teams / 2 * block) + SPLITTING * (split - 1)
                times.append((CYCLES * us, plan))
    return times


def arguments(x: Tensor, scale: Tensor, y: Tensor, plan: Plan, settled: bool) -> mixed.MixedArgs:
    """The kernel's last parameter."""
    return mixed.MixedArgs(
        scale=scale.data_ptr(),
        rows=y.shape[1],
        columns=x.shape[0],
        depth=x.shape[1],
        groups=scale.shape[1],
        group_blocks=x.shape[1] // plans.BLOCK,
        segment=plan.segment(x.shape[1]),
        tile_group=plan.tile_group,
        early=settled,
        box=plan.box(x.shape[0]),
    )


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "y")] + [("args", mixed.MixedArgs)]


@lru_cache(maxsize=256)
def _kernel(plan: Plan, shared: int, device: int) -> int:
    return nvrtc.load_kernel(device_functions() + entry(plan), "mxfp4_prefill", shared, device)


def multiply(x: Tensor, packed: Tensor, scale: Tensor, plan: Plan | None = None, *, settled: bool = False) -> Tensor:
    """x bfloat16 [M, K] by a packed weight [N, K/2]: [M, N], for which `fits` holds.

    Products are exact for group scales from 2^-62 to 2^65. settled: no kernel that may still run when this one is
    launched writes the weight.
    """
    return prepare(x, packed, scale, plan, settled=settled)(x, packed, scale)


def prepare(x: Tensor, packed: Tensor, scale: Tensor, plan: Plan | None = None, *, settled: bool = False) -> Run:
    """`multiply` of operands like these, as a function of them."""
    given = packed, scale
    x, packed, scale = aligned(x), aligned(packed), aligned(scale)
    settled = settled and packed is given[0] and scale is given[1]
    assert scale.shape[1] * GROUP == x.shape[1]
    plan = plan or plan_for(len(x), len(packed), x.shape[1])
    made: Any = {"size": (len(x), len(packed)), "dtype": x.dtype, "device": x.device}
    y, device = torch.empty(made["size"], dtype=x.dtype, device="meta"), x.get_device()
    values = _Arguments(args=arguments(x, scale, y, plan, settled))
    boxes = zip((packed, x, y), plan.boxes(len(x)), strict=True)
    map_codes, map_wide, map_y = (nvrtc.map_of(t, box) for t, box in boxes)
    grid, shared = (plan.grid(len(packed), len(x), nvrtc.processors(device)),), plan.bytes_for(x.shape[1])
    launch = nvrtc.Launch(_kernel(plan, shared, device), grid, plan.threads, shared, device, overlap=True)

    def run(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        x, packed, scale, y = aligned(x), aligned(packed), aligned(scale), torch.empty(**made)
        now = _Arguments.from_buffer_copy(values)
        now.args.scale = scale.data_ptr()
        ctypes.memmove(now.codes, map_codes(packed), 128)
        ctypes.memmove(now.wide, map_wide(x), 128)
        ctypes.memmove(now.y, map_y(y), 128)
        launch(now)
        return y

    return run
