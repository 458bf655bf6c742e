"""Quantization of 16-bit matrices in 1 x 128, 128 x 128 and 256 x 256 blocks on Hopper: CUDA C++ (blocks.cuh), compiled
at first use."""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.nvrtc import load_kernel

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16"}
SCALE_RULES = ("exact", "bf16", "pow2")  # 1, 2, 3 in the kernels
STREAM_BYTES = 40 << 20  # codes and input past this do not both fit in the 60 MB L2: mark them as passing through
PROCESSORS = 132  # of the device that the plans are for
HINTS = {
    True: '#define LOAD ".L1::no_allocate"\n#define STREAM ".cs"\n',
    False: '#define LOAD ""\n#define STREAM ""\n',
}
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) blocks(
    const void* x, void* q, float* scales, long long x_stride, long long scale_row, long long scale_column,
    unsigned rows, unsigned columns) {{
  quantrot::{call}({{x, q, scales, x_stride, scale_row, scale_column, rows, columns}});
}}
"""


@dataclass(frozen=True)
class Plan:
    resident: int  # thread blocks that a multiprocessor must have room for
    threads: int
    stream: bool = True  # cache hints: mark the data as not used again soon
    overlap: bool = True  # launched while the kernel before it ends

    cluster = 1

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        """The device function that runs this plan, with its template arguments."""
        raise NotImplementedError

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        """Thread blocks of a matrix."""
        raise NotImplementedError

    def source(self, block: tuple[int, int], dtype: torch.dtype, rule: str, gated: bool = False) -> str:
        return (
            f"#define SCALE_RULE {SCALE_RULES.index(rule) + 1}\n{HINTS[self.stream]}{device_functions()}"
            + ENTRY.format(
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
        return -(-rows // block[0]) * -(-columns // block[1]) * self.cluster


@dataclass(frozen=True)
class Groups(Plan):
    """Groups of 128 columns, of `rows` rows a warp."""

    rows: int = 4

    def call(self, block: tuple[int, int], dtype: torch.dtype, gated: bool = False) -> str:
        return f"groups_kernel<quantrot::{DTYPES[dtype]}, {self.rows}, {self.threads // 32}, {str(gated).lower()}>"

    def grid(self, rows: int, columns: int, block: tuple[int, int]) -> int:
        return -(-rows // self.rows) * -(-columns // (8 * self.threads))


PLANS: dict[
    tuple[int, int], Plan
] = {  # of the byte floor at 4096 x 4096, through the operator; Triton: 0.78, 0.78, 0.62
    (1, 128): Groups(16, 64, rows=4),  # 0.81
    (128, 128): Squares(3, 512),  # 0.80
    (256, 256): Squares(2, 512, cluster=2),  # 0.69; at 8192 x 8192 0.83, where Triton's has 0.85
}
LARGE = 1 << 26  # elements from which Triton's kernels are taken
FEW_ROWS = Groups(4, 128, rows=1)  # of a 1 x 128 matrix whose thread blocks would all be resident at once
GATED = Groups(6, 64, rows=4), Groups(8, 128, rows=1)  # of a 1 x 128 matrix from gate and up: the two likewise


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    kernels = Path(__file__).parent.parent
    files = kernels / "hopper.cuh", kernels / "hadamard/words.cuh", kernels / "fp8/blocks.cuh"
    return "".join(file.read_text() for file in files)


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


def supports(x: Tensor, block: tuple[int, int], gated: bool = False) -> bool:
    """Whether `quantize` takes x [M, K] (gated [M, 2 K]), contiguous columns, on this device and installation."""
    aligned = x.shape[1] % (16 if gated else 8) == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    fits = block in PLANS and x.dtype in DTYPES and aligned and max(x.shape) < 1 << 31
    size = block == (1, 128) if gated else x.numel() < LARGE
    return fits and size and x.device.type == "cuda" and nvrtc.available(x.device)


@lru_cache(maxsize=1024)
def plan_for(block: tuple[int, int], rows: int, columns: int, gated: bool = False) -> Plan:
    """Of a matrix of 16-bit numbers. What stays in L2 with its codes is not marked as passing through."""
    plan, few = GATED if gated else (PLANS[block], FEW_ROWS)
    if block == (1, 128) and plan.grid(rows, columns, block) < plan.resident * PROCESSORS:
        plan = few
    return plan if (5 if gated else 3) * rows * columns > STREAM_BYTES else replace(plan, stream=False)


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
    rows, columns = q.shape
    plan = plan or plan_for(block, rows, columns, gated)
    values = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), rows, columns)
    device = x.get_device()
    function = _kernel(plan, block, x.dtype, rule, gated, device)
    grid = plan.grid(rows, columns, block)
    nvrtc.launch(function, (grid,), plan.threads, plan.shared_bytes(), values, device, overlap=plan.overlap)
