"""A matrix and its transpose quantized from one read on Hopper: CUDA C++ (both_ways.cuh), compiled at first use. In
1 x 128 blocks it takes 16 bits, in 128 x 128 float32, too.

    supports   whether it takes a matrix
    prepare    the quantization of matrices like one, as a function of them and of what it writes
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import blocks
from quantrot.kernels.ready import Run

DTYPES = blocks.DTYPES | {torch.float32: "FP32"}
TILE, THREADS = 128, 256
SHARED = THREADS // 32 * TILE * 2 + TILE * 8 + TILE * TILE  # largest magnitudes, reciprocals, codes
RESIDENT = {2: 3, 4: 2}  # thread blocks that a multiprocessor must have room for, by an element's bytes
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {resident}) both_ways(
    const __grid_constant__ quantrot::BothWaysArgs args) {{
  quantrot::{call}(args);
}}
"""


class Arguments(ctypes.Structure):
    whole = True
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("turned", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("turned_scales", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("scale_row", ctypes.c_longlong),
        ("scale_column", ctypes.c_longlong),
        ("turned_scale_row", ctypes.c_longlong),
        ("turned_scale_column", ctypes.c_longlong),
        ("rows", ctypes.c_uint),
        ("columns", ctypes.c_uint),
        ("padded", ctypes.c_uint),
    ]


def call(block: tuple[int, int], dtype: torch.dtype) -> str:
    """The device function, with its template argument."""
    return f"{'squares' if block[0] == TILE else 'rows'}_both_ways<quantrot::{DTYPES[dtype]}>"


def source(block: tuple[int, int], dtype: torch.dtype, rule: str) -> str:
    shared = nvrtc.sources("hopper", "hadamard/words", "gate", "rms", "fp8/blocks", "fp8/both_ways")
    entry = ENTRY.format(threads=THREADS, resident=RESIDENT[dtype.itemsize], call=call(block, dtype))
    return f"#define SCALE_RULE {blocks.SCALE_RULES.index(rule) + 1}\n{blocks.CACHE_HINTS}{shared}{entry}"


def supports(x: Tensor, block: tuple[int, int]) -> bool:
    """Whether `prepare` takes x [M, K] on this device and installation."""
    if x.dtype == torch.float32:
        if block != (TILE, TILE) or x.shape[1] % 8 or x.stride(1) != 1:
            return False
        x = x.view(torch.bfloat16)  # whose rows lie alike
    return x.numel() > 0 and blocks.supports(x, block)


@lru_cache(maxsize=64)
def _kernel(block: tuple[int, int], dtype: torch.dtype, rule: str, device: int) -> Any:
    return nvrtc.load_kernel(source(block, dtype, rule), "both_ways", SHARED, device)


def prepare(
    x: Tensor, q: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, block: tuple[int, int], rule: str
) -> Run:
    """x [M, K], for which `supports` holds -> codes q [M, K] and turned [K, M to 128s], contiguous, and their scales;
    of operands like these, as a function of them."""
    (rows, columns), device = x.shape, x.get_device()
    strides = *scale.stride(), *turned_scale.stride()
    values = Arguments(None, None, None, None, None, x.stride(0), *strides, rows, columns, turned.shape[1])
    grid = (blocks.squares(rows, columns, (TILE, TILE)),)
    launch = nvrtc.Launch(_kernel(block, x.dtype, rule, device), grid, THREADS, SHARED, device, overlap=True)

    def run(x: Tensor, q: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor) -> None:
        now = Arguments.from_buffer_copy(values)
        now.x, now.q, now.scales = x.data_ptr(), q.data_ptr(), scale.data_ptr()
        now.turned, now.turned_scales = turned.data_ptr(), turned_scale.data_ptr()
        launch(now)

    return run
