"""Tokens behind RMSNorm, and an addition before it, as e4m3 on Hopper: CUDA C++ (normed_rows.cuh), compiled at first
use.

The norm's sum has an order that depends on the number of columns alone: a token has the same bits in any batch.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper, hopper_rows
from quantrot.kernels.mxfp4.reference import GROUP
from quantrot.kernels.mxfp4.triton_rows import room
from quantrot.kernels.ready import Run, address, lies_well

BLOCK = 128  # columns of a sum; K is a multiple of it
MOST_COLUMNS = 1 << 14
TILE = 2048  # bytes of a row that a warp has, where thread blocks take rows in turns
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::NormedArgs args) {{
  quantrot::{call}(args);
}}
"""


@dataclass(frozen=True)
class Plan:
    threads: int
    resident: int  # thread blocks of a multiprocessor
    units: int = 0  # eights of columns that a thread has, where a thread block has a row; 0: where they take turns
    stages: int = 2  # rows of a block that are on their way or in hand, where they take turns

    def entry(self, turn: hopper.Turn, arranged: bool, added: bool, name: str = "mxfp4_normed") -> str:
        """C++ of the kernel `name`."""
        more = hopper.template_of(turn)
        how = f"{more['span']}, quantrot::{more['rule']}, {str(arranged).lower()}"
        few = f"quantize_few_normed<{self.threads}, {self.units}, {how}>"
        many = f"quantize_normed<{self.threads}, {how}, {str(added).lower()}, {self.stages}>"
        call = few if self.units else many
        return ENTRY.format(threads=self.threads, resident=self.resident, name=name, call=call)

    def shared_bytes(self, added: bool) -> int:
        """Of a thread block: rows and the norm, what its warps tell each other, a sum of each 128 columns."""
        warps = self.threads // 32
        rows = 0 if self.units else warps * TILE * (self.stages * (1 + added) + 1)
        return rows + warps * 12 + self.threads * (self.units or 4) // 16 * 4

    def grid(self, rows: int, device: int) -> int:
        """Thread blocks."""
        return rows if self.units else min(rows, nvrtc.processors(device) * self.resident)


def plan_for(rows: int, columns: int, added: bool) -> Plan:
    """A row a thread block while all are resident at once; else as many blocks as fit, up to 1024 threads (8192 x 4096:
    35.0 us, 768 39.4, 512 53.5)."""
    (threads, units), at_once = hopper_rows.few_plan(columns), hopper_rows.ROWS_AT_ONCE
    resident = 1024 // threads
    if rows <= resident * at_once:
        return Plan(threads, resident if rows > at_once else 1, units)
    plan = Plan(32 * -(-columns // 1024), 1)
    room = nvrtc.SM_SHARED // (plan.shared_bytes(added) + 1024)
    return replace(plan, resident=min(room, 1024 // plan.threads))


class NormedArguments(ctypes.Structure):
    """NormedArgs of normed_rows.cuh."""

    whole = True
    _fields_ = [
        ("to", hopper_rows.Arguments),
        *((name, ctypes.c_void_p) for name in ("norm", "added", "total")),
        ("epsilon", ctypes.c_float),
        ("settled", ctypes.c_int),
    ]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    rows = nvrtc.sources("mxfp4/gated", "mxfp4/tokens", "mxfp4/rows", "mxfp4/expanded_rows", "mxfp4/few_rows")
    return hopper.group_functions() + rows + nvrtc.sources("rms", "mxfp4/normed_rows")


def has_columns(k: int) -> bool:
    """Whether a row of K columns is one that the kernels take."""
    return 0 < k <= MOST_COLUMNS and k % BLOCK == 0


def fits(x: Tensor, norm: Tensor, added: Tensor | None) -> bool:
    """Whether the kernels take x [M, K], norm [K] and added, as x. Does not look at the device."""
    well = lies_well(x) and lies_well(norm) and lies_well(added)
    return well and x.dtype == norm.dtype == torch.bfloat16 and has_columns(x.shape[1]) and x.numel() > 0


@lru_cache(maxsize=256)
def _kernel(plan: Plan, turn: hopper.Turn, arranged: bool, added: bool, device: int) -> Any:
    source = device_functions() + plan.entry(turn, arranged, added)
    return nvrtc.load_kernel(source, "mxfp4_normed", plan.shared_bytes(added), device)


def prepare(
    x: Tensor,
    epsilon: float,
    turn: hopper.Turn,
    added: bool,
    *,
    arranged: bool,
    settled: bool,
    plan: Plan | None = None,
) -> Run:
    """The kernel for an x [M, K] like this one, which `fits`, as a function of x, norm and added, or None: (e4m3 [M,
    K], a float32 scale a token, codes, x + added or x). codes: outside, packed and scale, as `quantize_expanded` writes
    them; of FP8, whose scales hold all of a token, None.

    arranged: in the order in which batch.cuh reads e4m3. settled: no kernel that may still run writes norm.
    """
    (rows, width), on, device = x.shape, x.device, x.get_device()
    plan, groups = plan or plan_for(rows, width, added), width // GROUP
    function, shared = _kernel(plan, turn, arranged, added, device), plan.shared_bytes(added)
    launch = nvrtc.Launch(function, (plan.grid(rows, device),), plan.threads, shared, device, overlap=True)
    args = hopper_rows.arguments(None, None, (None,) * 5, rows, groups, turn.hadamard, None)
    values = NormedArguments(args, None, None, None, epsilon, settled)

    def run(x: Tensor, norm: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor, Any, Tensor]:
        tokens, scale, outside = room(rows, width, on)
        now, codes = NormedArguments.from_buffer_copy(values), None
        total = x if added is None else torch.empty_like(x)
        to, now.norm, now.added, now.total = now.to, norm.data_ptr(), address(added), total.data_ptr()
        to.x, to.mask, to.row_scale = x.data_ptr(), tokens.data_ptr(), scale.data_ptr()
        if not turn.codes:
            packed = torch.empty((rows, width // 2), dtype=torch.uint8, device=on)
            codes = outside, packed, torch.empty((rows, groups), dtype=torch.uint8, device=on)
            to.outside, to.packed, to.scale = map(address, codes)
        launch(now)
        return tokens, scale, codes, total

    return run
