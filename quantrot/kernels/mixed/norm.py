"""RMSNorm on Hopper, of a few tokens in front of their product or of any number: CUDA C++ (norm.cuh), compiled at first
use."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import conversions

WIDE = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
WARPS = 8  # most plans of one token have as many, and so sum in the same order
VECTORS = 8  # of 16 bytes, of a token and of the norm's weight, that a thread may hold
MOST_COLUMNS = 8 * VECTORS * 32 * WARPS
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}) normed(
    const __grid_constant__ quantrot::NormArgs args) {{
  quantrot::norm_kernel<{vectors}, {warps}, quantrot::{dtype}>(args);
}}
"""


class NormArgs(ctypes.Structure):
    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "y", "added", "total")),
        ("x_stride", ctypes.c_longlong),
        ("depth", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("early", ctypes.c_int),
    ]


def source(vectors: int, dtype: torch.dtype) -> str:
    """C++ of the kernel `normed`."""
    ours = nvrtc.sources("mixed/multiply", "mixed/norm")
    functions = nvrtc.sources("hopper", "products") + conversions.device_functions() + ours
    return functions + ENTRY.format(threads=32 * WARPS, vectors=vectors, warps=WARPS, dtype=WIDE[dtype])


@lru_cache(maxsize=64)
def _kernel(vectors: int, dtype: torch.dtype, device: int) -> Any:
    return nvrtc.load_kernel(source(vectors, dtype), "normed", 4 * WARPS, device)


def supports(x: Tensor, norm: Tensor) -> bool:
    """Whether `normed` takes norm [K] with an x [..., K] of 16 bits whose rows are aligned to 16 bytes, there."""
    k = x.shape[-1]
    read = norm.is_contiguous() and norm.data_ptr() % 16 == 0
    return read and norm.dtype == x.dtype and x.dtype in WIDE and k % 8 == 0 and k <= MOST_COLUMNS


def vectors(depth: int) -> int:
    """Of 16 bytes, of a token of this size, that a thread has."""
    return -(-depth // (8 * 32 * WARPS))


def arguments(x: Tensor, norm: Tensor, epsilon: float, y: Tensor, early: bool) -> NormArgs:
    """The kernel's parameter, without an addition."""
    depth = x.shape[-1]
    apart = depth if x.is_contiguous() else x.stride(-2)  # a dimension of one may have any stride
    return NormArgs(x.data_ptr(), norm.data_ptr(), y.data_ptr(), None, None, apart, depth, epsilon, early)


def normed(x: Tensor, norm: Tensor, epsilon: float, early: bool = False) -> Tensor:
    """x [M, K] / sqrt(mean(x^2) + epsilon), rounded, * norm [K], rounded: [M, K], contiguous. early: no kernel that may
    still run writes norm. The next kernel may start at once: for few rows, beside which it has room."""
    return prepare(x, norm, epsilon, early)(x, norm)


def prepare(x: Tensor, norm: Tensor, epsilon: float, early: bool) -> Callable[..., Any]:
    """`normed` of tokens and a norm like these, as a function of them; or of tokens and what is added to them first,
    both contiguous, [..., K]: run(x, norm, added) returns (what is normed, the sum)."""
    device = x.get_device()
    values = arguments(x, norm, epsilon, torch.empty(x.shape, device="meta"), early)
    function, rows = _kernel(vectors(x.shape[-1]), x.dtype, device), x.numel() // x.shape[-1]
    launch = nvrtc.Launch(function, (rows,), 32 * WARPS, 4 * WARPS, device, overlap=True)
    made: Any = {"size": x.shape, "dtype": x.dtype, "device": x.device}

    def run(x: Tensor, norm: Tensor, added: Tensor | None = None) -> Any:
        y, now = torch.empty(**made), NormArgs.from_buffer_copy(values)
        now.x, now.norm, now.y = x.data_ptr(), norm.data_ptr(), y.data_ptr()
        if added is None:
            launch(now)
            return y
        total = torch.empty(**made)
        now.added, now.total = added.data_ptr(), total.data_ptr()
        launch(now)
        return y, total

    return run
