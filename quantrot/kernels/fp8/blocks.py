"""Quantization of 16-bit matrices in 1 x 128, 128 x 128 and 256 x 256 blocks on Hopper: CUDA C++ (blocks.cuh), compiled
at first use.

    quantize        a matrix, or what silu(gate) * up makes of one twice as wide
    prepare         the same as a function of matrices like it
    prepare_normed  that of rows behind RMSNorm, in 1 x 128 blocks
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.nvrtc import load_kernel
from quantrot.kernels.ready import Run

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16"}
SCALE_RULES = ("exact", "bf16", "pow2")  # 1, 2, 3 in the kernels
PROCESSORS = 132  # of the device that the plans are for
CACHE_HINTS = '#define LOAD ""\n#define STREAM ""\n'  # none: marked as passing through, nothing is faster
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) blocks(
    const void* x, void* q, float* scales, long long x_stride, long long scale_row, long long scale_column,
    unsigned rows, unsigned columns) {{
  quantrot::{call}({{x, q, scales, x_stride, scale_row, scale_column, rows, columns}});
}}
"""

NORMED_ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) blocks(
    const __grid_constant__ quantrot::BlockArgs args, const __grid_constant__ quantrot::NormArgs norm) {{
  quantrot::{call}(args, norm);
}}
"""


def squares(rows: int, columns: int, block: tuple[int, int]) -> int:
    """Blocks of a matrix."""
    return -(-rows // block[0]) * -(-columns // block[1])


@dataclass(frozen=True)
class Plan(ABC):
    resident: int  # thread blocks that a multiprocessor must have room for
    threads: int

    cluster = 1
    entry = ENTRY

    @abstractmethod
    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        """The device function that runs this plan, with its template arguments."""

    @abstractmethod
    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        """Thread blocks of a matrix."""

    def source(self, block: tuple[int, int], dtype: torch.dtype, rule: str, gated: bool = False) -> str:
        return (
            f"#define SCALE_RULE {SCALE_RULES.index(rule) + 1}\n{CACHE_HINTS}{device_functions()}"
            + self.entry.format(
                cluster=f"__cluster_dims__({self.cluster}, 1, 1) " if self.cluster > 1 else "",
                threads=self.threads,
                resident=self.resident,
                call=self.call(block, dtype, gated),
            )
        )

    def shared_bytes(self) -> int:
        return self.cluster * self.threads // 32 * 4


@dataclass(frozen=True)
class Squares(Plan):
    """A block by a cluster of thread blocks, so that several are resident and one loads while another stores."""

    cluster: int = 1

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        shape = f"{block[0]}, {block[1]}, {self.cluster}, {self.threads}"
        return f"blocks_kernel<quantrot::{DTYPES[dtype]}, {shape}>"

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        return squares(rows, columns, block) * self.cluster


@dataclass(frozen=True)
class Groups(Plan):
    """Groups of 128 columns, of `rows` rows a warp."""

    rows: int = 4
    warm: int = 0  # thread blocks, the first ones, that bring their rows to L2 while the kernel before ends

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        shape = f"{self.rows}, {self.threads // 32}, {str(gated).lower()}, {self.warm}"
        return f"groups_kernel<quantrot::{DTYPES[dtype]}, {shape}>"

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        return -(-rows // self.rows) * -(-columns // (8 * self.threads))


@dataclass(frozen=True)
class Rows(Plan):
    """A row, which is a block, by a thread block of so many threads that each has at most `units` of eight elements."""

    units: int = 4
    arranged: bool = False  # codes in the order of mxfp4/batch.cuh

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        shape = f"{self.units}, {self.threads}, {str(self.arranged).lower()}"
        return f"rows_kernel<quantrot::{DTYPES[dtype]}, {shape}>"

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        return rows


@dataclass(frozen=True)
class Normed(Plan):
    """A row behind RMSNorm by a thread block, of which each thread has at most `units` of eight elements. many: thread
    blocks take rows in turns, which may be added to first."""

    units: int = 1
    many: bool = False

    entry = NORMED_ENTRY

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        return f"normed_kernel<quantrot::{DTYPES[dtype]}, {self.units}, {self.threads}, {str(self.many).lower()}>"

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        return min(rows, PROCESSORS * self.resident) if self.many else rows

    def shared_bytes(self) -> int:
        return (1 + self.many) * self.units * self.threads // 16 * 4  # a sum of each 128 columns, of two rows in turn


# In parentheses what each has of the byte floor at 4096, 8192 and 16384 squared.
PLANS: dict[tuple[int, int], Plan] = {
    (1, 128): Groups(8, 128, rows=4, warm=8 * PROCESSORS),  # (0.89, 0.99, 1.01)
    (128, 128): Squares(3, 512),  # (0.84, 0.98, 1.02)
    (256, 256): Squares(2, 512, cluster=2),  # (0.75, 0.94, 1.01)
}
FEW_ROWS = Groups(4, 128, rows=1)  # of a 1 x 128 matrix whose thread blocks would all be resident at once
GATED = Groups(7, 128, rows=4), Groups(8, 128, rows=1)  # of a 1 x 128 matrix from gate and up: the two likewise


MOST_COLUMNS = 1 << 15  # of a row that a thread block has
MOST_NORMED = 1 << 14  # where the next row is on its way


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return nvrtc.sources("hopper", "hadamard/words", "gate", "rms", "fp8/blocks")


class Arguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("scale_row", ctypes.c_longlong),
        ("scale_column", ctypes.c_longlong),
        ("rows", ctypes.c_uint),
        ("columns", ctypes.c_uint),
    ]


class NormArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "added", "total")),
        ("epsilon", ctypes.c_float),
        ("settled", ctypes.c_int),
    ]


class NormedArguments(ctypes.Structure):
    _fields_ = [("args", Arguments), ("norm", NormArgs)]


def whole_row(block: tuple[int, int], columns: int) -> bool:
    """Whether a block is a row, and not one that PLANS has."""
    return block[0] == 1 and block not in PLANS and (block[1] == 0 or block[1] >= columns)


def row_plan(columns: int, units: int = 4) -> Rows:
    """Of rows that are blocks."""
    threads = 32 * -(-columns // (256 * units))
    return Rows(max(1, min(16, 1536 // threads)), threads, units=units)


def normed_plan(columns: int) -> Normed:
    """Of few rows. At most 512 threads, whose barrier every number waits for."""
    units = next(units for units in (1, 2, 4, 8) if columns <= 4096 * units)
    return Normed(1, 32 * -(-columns // (256 * units)), units=units)


def many_plan(rows: int, columns: int, added: bool) -> Normed:
    """Of rows that thread blocks take in turns: without an addition, which brings as many bytes again, more of a row
    for a thread (8192 x 4096: 39.1 us for 46.5; with one 68.4 for 62.1)."""
    few = normed_plan(columns)
    if rows <= 2 * PROCESSORS:
        return replace(few, many=True)
    units = few.units if added or few.units == 4 else 2 * few.units
    threads = 32 * -(-columns // (256 * units))
    return Normed(max(1, (512 if units == 4 else 1024) // threads), threads, units=units, many=True)


def supports(x: Tensor, block: tuple[int, int], gated: bool = False) -> bool:
    """Whether `quantize` takes x [M, K] (gated [M, 2 K]) on this device and installation."""
    aligned = x.shape[1] % (16 if gated else 8) == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    aligned = aligned and x.stride(1) == 1
    row = whole_row(block, x.shape[1]) and x.shape[1] <= MOST_COLUMNS
    taken = block == (1, 128) or (not gated and (block in PLANS or row))
    fits = taken and x.dtype in DTYPES and aligned and max(x.shape) < 1 << 31
    return fits and x.device.type == "cuda" and nvrtc.available(x.device)


def supports_normed(x: Tensor, norm: Tensor, added: Tensor | None = None, many: bool = False) -> bool:
    """Whether `prepare_normed` takes x [M, K] and norm [K], and added as x, on this device and installation."""
    read = norm.is_contiguous() and norm.dtype == x.dtype and norm.data_ptr() % 16 == 0
    if added is not None:
        read = read and many and x.is_contiguous() and added.is_contiguous() and added.data_ptr() % 16 == 0
    most = MOST_NORMED if many else MOST_COLUMNS
    return read and x.numel() > 0 and x.shape[1] <= most and supports(x, (1, 128))


@lru_cache(maxsize=1024)
def plan_for(block: tuple[int, int], rows: int, columns: int, gated: bool = False) -> Plan:
    """Of a matrix of 16-bit numbers."""
    if whole_row(block, columns):
        return row_plan(columns)
    if block != (1, 128):
        return PLANS[block]
    plan, few = GATED if gated else (PLANS[block], FEW_ROWS)
    return plan if plan.grid(rows, columns, block) >= plan.resident * PROCESSORS else few


@lru_cache(maxsize=256)
def _kernel(plan: Plan, block: tuple[int, int], dtype: torch.dtype, rule: str, gated: bool, device: int) -> Any:
    return load_kernel(plan.source(block, dtype, rule, gated), "blocks", plan.shared_bytes(), device)


def quantize(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    rule: str,
    gated: bool = False,
    plan: Plan | None = None,
) -> None:
    """x [M, K] (gated [M, 2 K]), not empty, for which `supports` holds -> codes q [M, K], contiguous, and scale."""
    prepare(x, q, scale, block, rule, gated, plan)(x, q, scale)


def prepare(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    rule: str,
    gated: bool = False,
    plan: Plan | None = None,
) -> Run:
    """`quantize` of operands like these, as a function of x, q and scale."""
    (rows, columns), device = q.shape, x.get_device()
    plan = plan or plan_for(block, rows, columns, gated)
    values = Arguments(None, None, None, x.stride(0), *scale.stride(), rows, columns)
    function = _kernel(plan, block, x.dtype, rule, gated, device)
    grid = (plan.grid(rows, columns, block),)
    launch = nvrtc.Launch(function, grid, plan.threads, plan.shared_bytes(), device, overlap=True)

    def run(x: Tensor, q: Tensor, scale: Tensor) -> None:
        now = Arguments.from_buffer_copy(values)
        now.x, now.q, now.scales = x.data_ptr(), q.data_ptr(), scale.data_ptr()
        launch(now)

    return run


def prepare_normed(
    x: Tensor, norm: Tensor, epsilon: float, q: Tensor, scale: Tensor, rule: str, settled: bool, plan: Normed
) -> Run:
    """x [M, K] / sqrt(mean(x^2) + epsilon), rounded, * norm [K], rounded -> codes q [M, K], contiguous, and scale, in
    1 x 128 blocks, of operands like these, for which `supports_normed` holds, as a function of x, norm, q and scale,
    and by a plan of many rows of what is added to x first and of the sum, [M, K]. settled: no kernel that may still run
    writes norm."""
    (rows, columns), device = x.shape, x.get_device()
    args = Arguments(None, None, None, x.stride(0), *scale.stride(), rows, columns)
    values = NormedArguments(args, NormArgs(None, None, None, epsilon, settled))
    function = _kernel(plan, (1, 128), x.dtype, rule, False, device)
    grid = (plan.grid(rows, columns, (1, 128)),)
    launch = nvrtc.Launch(function, grid, plan.threads, plan.shared_bytes(), device, overlap=True)

    def run(
        x: Tensor, norm: Tensor, q: Tensor, scale: Tensor, added: Tensor | None = None, total: Tensor | None = None
    ) -> None:
        now = NormedArguments.from_buffer_copy(values)
        args, now.norm.weight = now.args, norm.data_ptr()
        args.x, args.q, args.scales = x.data_ptr(), q.data_ptr(), scale.data_ptr()
        if added is not None and total is not None:
            now.norm.added, now.norm.total = added.data_ptr(), total.data_ptr()
        launch(now)

    return run
