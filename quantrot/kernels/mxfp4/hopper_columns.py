"""MXFP4 of a transpose on Hopper: CUDA C++ (columns.cuh, requantize.cuh), compiled at first use."""

import ctypes
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper_rows, tuned
from quantrot.kernels.mxfp4.reference import GROUP, Random, ScaleRule, float32
from quantrot.kernels.mxfp4.triton import float_signs, key_of, kind_of, outputs
from quantrot.kernels.ready import Run, address

THREADS = 64
TILE = 128, 64  # rows and columns
SIGNS = 4 * 36 * 4
CODE_BOX, SCALE_BOX = (128, 128), (128, 16)  # rows and bytes of a tile of codes, for four warps, and of their scales
SCRATCH, RANDOM = 32 * 64 + 64 * 32 + 8 * 80, 512  # bytes of a warp that turns codes, and of its random numbers

TRANSPOSE = """extern "C" __global__ void __launch_bounds__(64, {resident}) {name}(
    const __grid_constant__ quantrot::TransposeArgs args) {{
  quantrot::transpose<quantrot::{dtype}, {span}, {signs}, quantrot::{rule}, {mask}, {dither}, {stages}>({args});
}}
"""
REQUANTIZE = """extern "C" __global__ void __launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap scales,
    const __grid_constant__ quantrot::TensorMap packed, const __grid_constant__ quantrot::TransposeArgs args) {{
  quantrot::requantize<{span}, {signs}, quantrot::{rule}, {dither}, {stages}>(&codes, &scales, &packed, {args});
}}
"""


class Arguments(ctypes.Structure):
    """TransposeArgs of columns.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "in_scale", "signs", "packed", "scale", "mask")),
        ("pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        ("root", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("s0", "s1", "o0", "o1", "down", "staged", "run")),
        ("drawn", ctypes.c_void_p),
    ]


class CodeArguments(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_ubyte * 128) for name in ("codes", "scales", "packed")), ("args", Arguments)]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return hopper_rows.device_functions() + nvrtc.sources("mxfp4/columns", "mxfp4/code_columns", "mxfp4/requantize")


def entry(
    dtype: torch.dtype,
    rule: ScaleRule,
    hadamard: int,
    signs: bool,
    *,
    mask: bool = False,
    dither: bool = False,
    drawn: bool = False,
    resident: int = 6,
    stages: int = 2,
    name: str = "mxfp4_columns",
) -> str:
    """C++ of the kernel `name` for elements of this dtype; uint8: for codes, by blocks of so many threads."""
    fields = {
        "name": name,
        "span": hadamard // GROUP,
        "signs": str(signs).lower(),
        "rule": str(rule).upper(),
        "dither": str(dither).lower(),
        "stages": stages,
        "args": hopper_rows.args_of(drawn),
    }
    if dtype == torch.uint8:
        return REQUANTIZE.format(threads=resident, **fields)
    return TRANSPOSE.format(resident=resident, dtype=hopper_rows.PACKED_IN[dtype], mask=str(mask).lower(), **fields)


def shared_bytes(dtype: torch.dtype, stages: int, threads: int = THREADS, dither: bool = False) -> int:
    """Of a block: its tiles, and the signs of rows, or what its warps turn codes in, and barriers."""
    if dtype != torch.uint8:
        return stages * math.prod(TILE) * dtype.itemsize + SIGNS
    ring = stages * (math.prod(CODE_BOX) + math.prod(SCALE_BOX) + 16)  # of four warps, with barriers
    return threads // 128 * ring + threads // 32 * (SCRATCH + RANDOM * dither)


def arguments(rows: int, columns: int, pitch: int, hadamard: int, down: bool) -> Arguments:
    """The kernel's parameters of a matrix, its pitch in bytes, but for addresses and random numbers."""
    return Arguments(*[None] * 6, pitch, rows, columns, float32((hadamard or 1) ** -0.5), 0, 0, 0, 0, down, 0, 1)


def run_of(tiles: int, teams: int) -> int:
    """How many tiles of codes come together, one below the other: up to eight, whose scales are 32 bytes a column,
    while no team has more of them than it must."""
    most = -(-tiles // teams)
    return next(run for run in (8, 4, 2, 1) if -(-tiles // run // teams) * run <= most)


def fits(x: Tensor) -> bool:
    """Whether the kernel takes these rows: elements or packed bytes, whole units of 16 bytes of them."""
    return x.dtype in (torch.uint8, *hopper_rows.PACKED_IN) and x.shape[1] * x.element_size() % 16 == 0 < x.numel()


@lru_cache(maxsize=256)
def _kernel(source: str, shared: int, device: int) -> Any:
    return nvrtc.load_kernel(device_functions() + source, "mxfp4_columns", shared, device)


def plan_of(dtype: torch.dtype, dither: bool, hadamard: int) -> tuple[int, int, bool]:
    """(thread blocks of a multiprocessor, of codes threads of its one, a multiple of 128; stages; whether tiles of
    elements follow each other down the rows: those of codes always do)."""
    if dtype == torch.uint8:
        return *(tuned.HOPPER_RANDOM_PACKED_COLUMNS if dither else tuned.HOPPER_PACKED_COLUMNS)[hadamard], False
    return tuned.HOPPER_COLUMNS if dtype.itemsize == 2 else tuned.HOPPER_WIDE_COLUMNS


def _run(
    x: Tensor,
    in_scale: Tensor | None,
    rule: ScaleRule,
    hadamard: int,
    signs: Tensor | None,
    random: Random | None,
    mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, wide), of_codes = x.shape, in_scale is not None
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    packed, scale, bits = outputs(x, (2 * wide if of_codes else wide, rows), mask)
    factors = None if signs is None else float_signs(signs, x)
    plan = plan_of(x.dtype, random is not None, hadamard)
    kind = x.dtype, rule, hadamard, signs is not None, mask, *kind_of(random).values()
    run = launched(plan, rows, wide, x.stride(0), *kind, x.get_device())
    given = (t.data_ptr() for t in (packed, scale, bits))
    run(x.data_ptr(), address(in_scale), address(factors), *given, random)
    return packed, scale, bits


@lru_cache(maxsize=256)
def launched(
    plan: tuple[int, int, bool], rows: int, wide: int, pitch: int, dtype: torch.dtype, rule: ScaleRule, hadamard: int,
    signs: bool, mask: bool, dither: bool, drawn: bool, device: int,
) -> Run:  # fmt: skip
    """The kernel for rows of so many elements or bytes of codes, `pitch` from one to the next, as a function of where x
    and its scale, signs, packed, scale and mask lie and of random numbers."""
    resident, stages, down = plan
    source = entry(
        dtype, rule, hadamard, signs, mask=mask, dither=dither, drawn=drawn, resident=resident, stages=stages
    )
    groups, threads, blocks = wide // 16, THREADS, nvrtc.processors(device) * resident  # groups: of codes
    tiles = -(-rows // TILE[0]) * -(-wide // TILE[1])
    if dtype == torch.uint8:
        threads, blocks, tiles = resident, nvrtc.processors(device), -(-rows // 128) * -(-wide // CODE_BOX[1])
    shared, of_codes = shared_bytes(dtype, stages, threads, dither), dtype == torch.uint8
    grid = (min(tiles, blocks),)
    launch = nvrtc.Launch(_kernel(source, shared, device), grid, threads, shared, device, overlap=of_codes)
    args = arguments(rows, wide * (1 + of_codes), pitch * dtype.itemsize, hadamard, down)
    if of_codes:
        args.run = run_of(tiles, min(tiles, blocks) * threads // 128)
        code_map = nvrtc.maps_of((wide, rows), (pitch,), CODE_BOX[::-1], dtype, 128, 128)
        dealt = (rows // 2, wide // 2, 4), (2 * rows, rows // 2), (64, 8, 4)  # rows 4 g + c at 8 c + g
        packed_map = nvrtc.maps_of(*dealt, dtype, 64, 256)
        tall, narrow = SCALE_BOX
        staged = {0: 1, 8: 2}.get(groups % 16, 0)  # rows of scales that are whole units of 16 bytes
        if staged:
            sizes, box = (groups * staged, rows // staged), (narrow, tall // staged)
            scale_map = nvrtc.maps_of(sizes, sizes[:1], box, dtype, 0, 128)
    values: CodeArguments | Arguments = CodeArguments(args=args) if of_codes else args

    def run(
        x: int, in_scale: int | None, signs: int | None, packed: int, scale: int, mask: int | None,
        random: Random | None,
    ) -> None:  # fmt: skip
        now = type(values).from_buffer_copy(values)
        args = now.args if isinstance(now, CodeArguments) else now
        args.x, args.in_scale, args.signs, args.packed, args.scale, args.mask = x, in_scale, signs, packed, scale, mask
        args.s0, args.s1, args.o0, args.o1 = key_of(random)
        args.drawn = address(random and random.drawn)
        if isinstance(now, CodeArguments):
            ctypes.memmove(now.codes, code_map(x), 128)
            ctypes.memmove(now.packed, packed_map(packed), 128)
            if in_scale and staged and in_scale % 16 == 0:
                args.staged = staged
                ctypes.memmove(now.scales, scale_map(in_scale), 128)
        launch(now)

    return run


def quantize_columns(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: Random | None, mask: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> packed [K, M/2], scale [K, M/32], mask [K, M/8] or empty, of its transpose."""
    return _run(x, None, rule, hadamard, signs, random, mask)


def requantize(
    packed: Tensor, scale: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: Random | None
) -> tuple[Tensor, Tensor]:
    """packed [M, K/2], scale [M, K/32] -> packed [K, M/2], scale [K, M/32] of the transpose, transformed."""
    out, out_scale, _ = _run(packed, scale.contiguous(), rule, hadamard, signs, random, False)
    return out, out_scale
