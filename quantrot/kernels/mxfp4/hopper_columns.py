"""MXFP4 of a transpose on Hopper: CUDA C++ (columns.cuh), compiled at first use."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper_rows, tuned
from quantrot.kernels.mxfp4.reference import GROUP, ScaleRule, float32
from quantrot.kernels.mxfp4.triton import float_signs, key_of, outputs

THREADS = 256
TILE = 128 * 128  # bytes
POWERS = 8 * 4 * 80  # bytes of the warps' powers of two of a tile of codes
SIGNS = 4 * 36 * 4

TRANSPOSE = """extern "C" __global__ void __launch_bounds__(256, {resident}) {name}(
    const void* x, const unsigned char* in_scale, const float* signs, unsigned char* packed, unsigned char* scale,
    unsigned* mask, long long pitch, int rows, int columns, float root, unsigned s0, unsigned s1, unsigned o0,
    unsigned o1, int down) {{
  quantrot::transpose<quantrot::{dtype}, {packed}, {span}, {signs}, quantrot::{rule}, {mask}, {dither}, {stages}>(
      {{x, in_scale, signs, packed, scale, mask, pitch, rows, columns, root, {{s0, s1, o0, o1}}, down}});
}}
"""


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "in_scale", "signs", "packed", "scale", "mask")),
        ("pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        ("root", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("s0", "s1", "o0", "o1", "down")),
    ]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return hopper_rows.device_functions() + (Path(__file__).parent / "columns.cuh").read_text()


def entry(
    dtype: torch.dtype,
    rule: ScaleRule,
    hadamard: int,
    signs: bool,
    *,
    mask: bool = False,
    dither: bool = False,
    resident: int = 3,
    stages: int = 3,
    name: str = "mxfp4_columns",
) -> str:
    """C++ of the kernel `name` for elements of this dtype, uint8 for packed ones."""
    return TRANSPOSE.format(
        resident=resident,
        name=name,
        dtype=hopper_rows.IN.get(dtype, "Bf16"),
        packed=str(dtype == torch.uint8).lower(),
        span=hadamard // GROUP,
        signs=str(signs).lower(),
        rule=str(rule).upper(),
        mask=str(mask).lower(),
        dither=str(dither).lower(),
        stages=stages,
    )


def shared_bytes(dtype: torch.dtype, stages: int) -> int:
    """Of a block: its tiles, and the powers of two of codes or the signs of rows."""
    return stages * TILE + (POWERS if dtype == torch.uint8 else SIGNS)


def arguments(
    x: Tensor,
    in_scale: Tensor | None,
    signs: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    hadamard: int,
    random: tuple[int, int] | None,
    down: bool,
) -> Arguments:
    """The kernel's parameters; x: elements, or packed with its scale; outputs: packed, scale, mask."""
    pointers = (None if t is None else t.data_ptr() for t in (x, in_scale, signs, *outputs))
    columns = x.shape[1] * (2 if in_scale is not None else 1)
    root = float32((hadamard or 1) ** -0.5)
    return Arguments(*pointers, x.stride(0) * x.element_size(), x.shape[0], columns, root, *key_of(random), down)


def fits(x: Tensor, rule: ScaleRule, hadamard: int) -> bool:
    """Whether the kernel takes these rows: 16-bit elements or packed bytes, whole units of 16 bytes of them."""
    dtypes = x.dtype == torch.uint8 or (
        x.dtype in hopper_rows.IN and hopper_rows.rounds_exactly(x.dtype, rule, hadamard)
    )
    return dtypes and x.shape[1] * x.element_size() % 16 == 0 < x.numel()


@lru_cache(maxsize=256)
def _kernel(source: str, shared: int, device: int) -> Any:
    return nvrtc.load_kernel(device_functions() + source, "mxfp4_columns", shared, device)


def plan_of(dtype: torch.dtype, dither: bool) -> tuple[int, int, bool]:
    """(thread blocks of a multiprocessor, stages, whether tiles follow each other down the rows)."""
    if dtype == torch.uint8:
        return tuned.HOPPER_PACKED_COLUMNS
    return tuned.HOPPER_RANDOM_COLUMNS if dither else tuned.HOPPER_COLUMNS


def _run(
    x: Tensor,
    in_scale: Tensor | None,
    rule: ScaleRule,
    hadamard: int,
    signs: Tensor | None,
    random: tuple[int, int] | None,
    mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, wide = x.shape
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    columns = 2 * wide if in_scale is not None else wide
    packed, scale, bits = outputs(x, (columns, rows), mask)
    dither = random is not None
    resident, stages, down = plan_of(x.dtype, dither)
    source = entry(
        x.dtype, rule, hadamard, signs is not None, mask=mask, dither=dither, resident=resident, stages=stages
    )
    device, shared = x.get_device(), shared_bytes(x.dtype, stages)
    factors = None if signs is None else float_signs(signs, x)
    parameters = arguments(x, in_scale, factors, (packed, scale, bits), hadamard, random, down)
    tiles = -(-rows // 128) * -(-(wide * x.element_size()) // 128)
    blocks = min(tiles, nvrtc.processors(device) * resident)
    nvrtc.launch(_kernel(source, shared, device), (blocks,), THREADS, shared, parameters, device)
    return packed, scale, bits


def quantize_columns(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: tuple[int, int] | None, mask: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> packed [K, M/2], scale [K, M/32], mask [K, M/8] or empty, of its transpose."""
    return _run(x, None, rule, hadamard, signs, random, mask)


def requantize(
    packed: Tensor, scale: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """packed [M, K/2], scale [M, K/32] -> packed [K, M/2], scale [K, M/32] of the transpose, transformed."""
    out, out_scale, _ = _run(packed, scale.contiguous(), rule, hadamard, signs, random, False)
    return out, out_scale
