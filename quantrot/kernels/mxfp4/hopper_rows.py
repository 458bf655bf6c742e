"""MXFP4 along rows on Hopper: CUDA C++ (rows.cuh and its followers), compiled at first use, for elements of 16 bits
and, but for e4m3, float32.

Persistent kernels: as many thread blocks as fit, every warp with the next tiles of its data on their way.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper, tuned
from quantrot.kernels.mxfp4.reference import GROUP, Random, ScaleRule, float32
from quantrot.kernels.mxfp4.triton import float_signs, key_of, kind_of, outputs
from quantrot.kernels.mxfp4.triton_rows import room
from quantrot.kernels.ready import Run, address

IN = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
PACKED_IN = IN | {torch.float32: "Fp32"}  # of `quantize` and `dequantize`
MOST_THREADS = 1024  # of a block that holds a row whose e4m3 operand is written at once
ROWS_AT_ONCE = 132  # multiprocessors
TILE = 2048  # bytes of a warp's groups, one a lane, of 16 bits
EACH = 4  # units of 16 bytes that a thread of `dequantize` writes
EXPAND_THREADS = 256  # a warp a row

ROWS = """extern "C" __global__ void __launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::QuantizeArgs args) {{
  quantrot::{call}<quantrot::{dtype}, {span}, {signs}, quantrot::{rule}, {more}{stages}>({args});
}}
"""
FEW_ROWS = """extern "C" __global__ void __launch_bounds__({threads}) {name}(
    const __grid_constant__ quantrot::QuantizeArgs args) {{
  quantrot::quantize_few<quantrot::{dtype}, {span}, quantrot::{rule}, {gated}, {units}>(args);
}}
"""
DEQUANTIZE = """extern "C" __global__ void __launch_bounds__(256) {name}(
    const void* packed, const unsigned char* scale, void* y, long long units) {{
  quantrot::dequantize<quantrot::{dtype}, {each}>(packed, scale, y, units);
}}
"""
EXPAND = """extern "C" __global__ void __launch_bounds__({threads}) {name}(
    quantrot::ExpandArgs first, quantrot::ExpandArgs second) {{
  quantrot::expand_both(first, second);
}}
"""
MASKED = """extern "C" __global__ void __launch_bounds__({threads}, {resident}) {name}(quantrot::MaskedArgs args) {{
  quantrot::masked_hadamard<quantrot::{dtype}, {wide}, {groups}, {stages}>(args);
}}
"""


class Arguments(ctypes.Structure):
    """QuantizeArgs of rows.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "signs", "packed", "scale", "mask", "row_scale", "outside")),
        ("rows", ctypes.c_longlong),
        ("row_groups", ctypes.c_longlong),
        ("root", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("s0", "s1", "o0", "o1")),
        ("drawn", ctypes.c_void_p),
    ]


class DequantizeArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scale", "y")),
        ("units", ctypes.c_longlong),
    ]


class ExpandArguments(ctypes.Structure):
    """ExpandArgs of expand.cuh; `outside` may be None."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scale", "e4m3", "row_scale", "outside")),
        *((name, ctypes.c_int) for name in ("rows", "groups")),
    ]


class Both(ctypes.Structure):
    _fields_ = [("first", ExpandArguments), ("second", ExpandArguments)]


class MaskedArguments(ctypes.Structure):
    """MaskedArgs of masked.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "mask", "y")),
        ("groups", ctypes.c_longlong),
        ("factor", ctypes.c_float),
    ]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    rows = nvrtc.sources("mxfp4/gated", "mxfp4/rows", "mxfp4/expanded_rows", "mxfp4/few_rows")
    return hopper.group_functions() + rows + nvrtc.sources("mxfp4/expand", "mxfp4/masked")


def entry(
    dtype: torch.dtype,
    rule: ScaleRule,
    hadamard: int,
    signs: bool,
    *,
    expanded: bool = False,
    arranged: bool = False,
    gated: bool = False,
    mask: bool = False,
    dither: bool = False,
    drawn: bool = False,
    threads: int = 128,
    resident: int = 6,
    stages: int = 3,
    name: str = "mxfp4_rows",
) -> str:
    """C++ of the kernel `name` that quantizes elements of this dtype; see `quantize` and `quantize_expanded`."""
    return ROWS.format(
        threads=threads,
        resident=resident,
        name=name,
        call="quantize_expanded" if expanded else "quantize",
        dtype=PACKED_IN[dtype],
        span=hadamard // GROUP,
        signs=str(signs).lower(),
        rule=str(rule).upper(),
        args=args_of(drawn),
        more="".join(f"{str(flag).lower()}, " for flag in ((arranged, gated) if expanded else (mask, dither))),
        stages=stages,
    )


def few_entry(
    dtype: torch.dtype, rule: ScaleRule, hadamard: int, gated: bool, plan: tuple[int, int], name: str = "mxfp4_rows"
) -> str:
    """C++ of the kernel `name` for few rows, in the order in which batch.cuh reads them; plan: see `few_plan`."""
    sizes = {"threads": plan[0], "units": plan[1], "span": hadamard // GROUP}
    kind = {"dtype": IN[dtype], "rule": str(rule).upper(), "gated": str(gated).lower()}
    return FEW_ROWS.format(name=name, **sizes, **kind)


def few_plan(width: int) -> tuple[int, int]:
    """(threads, eight columns of a row that each has) of the kernel for few rows."""
    units = -(-width // (8 * MOST_THREADS))
    return -(-width // (8 * units * 32)) * 32, units


def few_rows(rows: int, width: int) -> bool:
    """Whether rows as the batch's product reads them take the kernel for few: one a multiprocessor (32 x 14336 3.0 us
    for 3.8, 128 3.8 for 4.9). Up to 32 narrow ones leave more room to the product that starts beside them without it
    (behind 32 x 4096, 4096 x 4096 takes 9.2 us for 10.0)."""
    return rows <= ROWS_AT_ONCE and (rows > 32 or width > 4096)


def args_of(drawn: bool) -> str:
    """A kernel's parameters, with drawn numbers added to its key."""
    return "args.with_drawn()" if drawn else "args"


def lane_groups(hadamard: int) -> int:
    """Groups of 32 columns that a thread of `quantize` has: a Hadamard block."""
    return max(hadamard // GROUP, 1)


def shared_bytes(
    threads: int, stages: int, hadamard: int, *, expanded: bool = False, gated: bool = False, wide: bool = False
) -> int:
    """Of a block: its warps' tiles, signs, and what the warps tell each other of a row, or a counter of tiles. wide: of
    float32."""
    warps, signs = threads // 32, lane_groups(hadamard) * 36 * 4
    if expanded:
        return warps * (stages * TILE * (1 + gated) + 36) + signs
    return warps * stages * lane_groups(hadamard) * TILE * (1 + wide) + signs + 16


@lru_cache(maxsize=256)
def _kernel(source: str, shared: int, device: int) -> Any:
    return nvrtc.load_kernel(device_functions() + source, "mxfp4_rows", shared, device)


def arguments(
    x: Tensor | None,
    signs: Tensor | None,
    outputs: tuple[Tensor | None, ...],
    rows: int,
    row_groups: int,
    hadamard: int,
    random: Random | None,
) -> Arguments:
    """The kernel's parameters; outputs: packed, scale, mask or the e4m3 operand, row scale, outside."""
    pointers = (None if t is None else t.data_ptr() for t in (x, signs, *outputs))
    return Arguments(
        *pointers, rows, row_groups, float32((hadamard or 1) ** -0.5), *key_of(random), address(random and random.drawn)
    )


def fits(x: Tensor, row: bool = False) -> bool:
    """Whether the kernels take this tensor; row: whole rows of it at a time."""
    whole = x.numel() > 0 and not (row and x.shape[-1] > MOST_THREADS * GROUP)
    return x.dtype in (IN if row else PACKED_IN) and whole


def gates(dtype: torch.dtype, width: int, hadamard: int) -> bool:
    """Whether `quantize_expanded` takes gate and up of this width, which are twice the tiles."""
    threads = -(-width // (32 * GROUP)) * 32
    shared = shared_bytes(threads, tuned.HOPPER_EXPANDED[1], hadamard, expanded=True, gated=True)
    return dtype == torch.bfloat16 and threads <= MOST_THREADS and shared <= nvrtc.MAX_SHARED


def plan_of(dtype: torch.dtype, hadamard: int, mask: bool, dither: bool) -> tuple[int, int, int]:
    """(threads, thread blocks of a multiprocessor, stages) of `quantize`."""
    if dtype == torch.float32:
        return tuned.HOPPER_WIDE_ROWS[hadamard or GROUP]
    plans = tuned.HOPPER_RANDOM_ROWS if dither else tuned.HOPPER_MASK_ROWS if mask else tuned.HOPPER_ROWS
    return plans[hadamard or GROUP]


def quantize(
    x: Tensor,
    rule: ScaleRule,
    hadamard: int,
    signs: Tensor | None,
    random: Random | None,
    mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> packed, scale, mask (empty unless asked for). Checked by the caller."""
    x, factors = hopper.aligned(x), signs
    if signs is not None:
        factors = float_signs(signs, x)
    packed, scale, bits = outputs(x, x.shape, mask)
    plan = plan_of(x.dtype, hadamard, mask, random is not None)
    kind = x.dtype, rule, hadamard, signs is not None, mask, *kind_of(random).values()
    run = launched(plan, x.numel() // GROUP, *kind, x.get_device())
    run(x.data_ptr(), address(factors), packed.data_ptr(), scale.data_ptr(), bits.data_ptr(), random)
    return packed, scale, bits


@lru_cache(maxsize=256)
def launched(
    plan: tuple[int, int, int], groups: int, dtype: torch.dtype, rule: ScaleRule, hadamard: int, signs: bool,
    mask: bool, dither: bool, drawn: bool, device: int,
) -> Run:  # fmt: skip
    """`quantize` of so many groups, as a function of where x, signs, packed, scale, mask lie and of random numbers."""
    threads, resident, stages = plan
    source = entry(
        dtype, rule, hadamard, signs, mask=mask, dither=dither, drawn=drawn, threads=threads, resident=resident,
        stages=stages,
    )  # fmt: skip
    shared = shared_bytes(threads, stages, hadamard, wide=dtype == torch.float32)
    blocks = min(-(-groups // (threads * lane_groups(hadamard))), nvrtc.processors(device) * resident)
    launch = nvrtc.Launch(_kernel(source, shared, device), (blocks,), threads, shared, device)
    values = arguments(None, None, (None,) * 5, 1, groups, hadamard, None)

    def run(x: int, signs: int | None, packed: int, scale: int, mask: int | None, random: Random | None) -> None:
        now = Arguments.from_buffer_copy(values)
        now.x, now.signs, now.packed, now.scale, now.mask = x, signs, packed, scale, mask
        now.s0, now.s1, now.o0, now.o1 = key_of(random)
        now.drawn = address(random and random.drawn)
        launch(now)

    return run


def quantize_expanded(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, *, arranged: bool = False, gated: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> e4m3, row scale, outside; packed and scale, written where a row has a group below the window.

    arranged: e4m3's columns in the order in which batch.cuh reads them. gated: of silu(gate) * up, x [M, 2 K] bfloat16.
    """
    return prepare_expanded(x, rule, hadamard, signs, arranged=arranged, gated=gated)(x, signs)


def prepare_expanded(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, *, arranged: bool = False, gated: bool = False
) -> Run:
    """`quantize_expanded` of an x and signs like these, as a function of them."""
    rows, width, on, device = len(x), x.shape[1] >> gated, x.device, x.get_device()
    groups, (most, stages) = width // GROUP, tuned.HOPPER_EXPANDED
    if arranged and signs is None and few_rows(rows, width):
        plan = threads, _ = few_plan(width)
        source, blocks = few_entry(x.dtype, rule, hadamard, gated, plan), rows
        shared = threads // 32 * 12
    else:
        threads = -(-groups // 32) * 32
        resident = max(1, min(16, most // threads))
        source = entry(
            x.dtype, rule, hadamard, signs is not None,
            expanded=True, arranged=arranged, gated=gated, threads=threads, resident=resident, stages=stages,
        )  # fmt: skip
        blocks = min(rows, nvrtc.processors(device) * resident)
        shared = shared_bytes(threads, stages, hadamard, expanded=True, gated=gated)
    values = arguments(None, None, (None,) * 5, rows, groups, hadamard, None)
    launch = nvrtc.Launch(_kernel(source, shared, device), (blocks,), threads, shared, device, overlap=True)

    def run(x: Tensor, signs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, factors, now = hopper.aligned(x), signs, Arguments.from_buffer_copy(values)
        if signs is not None:
            factors = float_signs(signs, x)
        packed = torch.empty((rows, width // 2), dtype=torch.uint8, device=on)
        scale, to = torch.empty((rows, groups), dtype=torch.uint8, device=on), room(rows, width, on)
        now.x, now.signs, now.packed, now.scale = map(address, (x, factors, packed, scale))
        now.mask, now.row_scale, now.outside = map(address, to)
        launch(now)
        return *to, packed, scale

    return run


@lru_cache(maxsize=8)
def _expand_kernel(device: int) -> Any:
    source = device_functions() + EXPAND.format(name="mxfp4_expand", threads=EXPAND_THREADS)
    return nvrtc.load_kernel(source, "mxfp4_expand", 0, device)


def expand(
    packed: Tensor, scale: Tensor, to: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """packed [N, K/2], scale [N, K/32], not empty -> e4m3 [N, K], row scale [N], outside [N].

    to: the `room` for them, made before the kernel that was launched last, which writes neither room nor weight, and
    lets no other start before it has waited for those before it: the two then run at the same time.
    """
    weight = hopper.aligned(packed), scale.contiguous()
    beside = to is not None and weight[0] is packed and weight[1] is scale
    (rows, groups), device = scale.shape, packed.get_device()
    to = to or room(rows, GROUP * groups, packed.device)
    first = ExpandArguments(*(t.data_ptr() for t in (*weight, *to)), rows, groups)
    expand_launch(rows, 0, device, beside)(Both(first, ExpandArguments()))
    return to


def expand_both(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """`expand` of two matrices by one kernel."""
    given, made = [], []
    for packed, scale in ((hopper.aligned(a), a_scale.contiguous()), (hopper.aligned(b), b_scale.contiguous())):
        rows, groups = scale.shape
        to = room(rows, GROUP * groups, a.device)
        given.append(ExpandArguments(*(t.data_ptr() for t in (packed, scale, *to)), rows, groups))
        made.append(to)
    expand_launch(len(a), len(b), a.get_device())(Both(*given))
    return tuple(made)


@lru_cache(maxsize=256)
def expand_launch(first: int, second: int, device: int, overlap: bool = False) -> nvrtc.Launch:
    """Of so many rows of one matrix, and of another, of Both."""
    blocks = sum(-(-rows // (EXPAND_THREADS // 32)) for rows in (first, second))
    return nvrtc.Launch(_expand_kernel(device), (blocks,), EXPAND_THREADS, 0, device, overlap=overlap)


def masked_hadamard(x: Tensor, mask: Tensor, hadamard: int, factor: float, dtype: torch.dtype) -> Tensor:
    """x [..., K] bfloat16 or float16, not empty, where mask [..., K/8] is set, turned, times a factor, as dtype: x's or
    float32."""
    x, mask = hopper.aligned(x), hopper.aligned(mask)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    plan, wide = tuned.HOPPER_MASKED[hadamard], dtype != x.dtype
    run = masked(plan, x.numel() // GROUP, x.dtype, hadamard, wide, x.get_device())
    run(x.data_ptr(), mask.data_ptr(), y.data_ptr(), factor)
    return y


def masked_entry(
    plan: tuple[int, int, int], dtype: torch.dtype, hadamard: int, wide: bool, name: str = "masked_hadamard"
) -> str:
    """C++ of the kernel `name` for gradients of this dtype; wide: to float32."""
    threads, resident, stages = plan
    sizes = {"threads": threads, "resident": resident, "groups": lane_groups(hadamard), "stages": stages}
    return MASKED.format(name=name, dtype=IN[dtype], wide=str(wide).lower(), **sizes)


@lru_cache(maxsize=256)
def masked(plan: tuple[int, int, int], groups: int, dtype: torch.dtype, hadamard: int, wide: bool, device: int) -> Run:
    """`masked_hadamard` of so many groups, as a function of where x, mask and y lie and of the factor."""
    threads, resident, stages = plan
    shared, source = shared_bytes(threads, stages, hadamard), masked_entry(plan, dtype, hadamard, wide)
    function = nvrtc.load_kernel(device_functions() + source, "masked_hadamard", shared, device)
    blocks = min(-(-groups // (threads * lane_groups(hadamard))), nvrtc.processors(device) * resident)
    launch = nvrtc.Launch(function, (blocks,), threads, shared, device)
    return lambda x, mask, y, factor: launch(MaskedArguments(x, mask, y, groups, factor))


@lru_cache(maxsize=16)
def _dequantize_kernel(dtype: torch.dtype, device: int) -> Any:
    source = device_functions() + DEQUANTIZE.format(name="mxfp4_dequantize", dtype=PACKED_IN[dtype], each=EACH)
    return nvrtc.load_kernel(source, "mxfp4_dequantize", 0, device)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] in `dtype`, of 16 bits or float32: packed uint8 [..., K/2] and scale uint8 [..., K/32], not empty."""
    packed, scale = hopper.aligned(packed), scale.contiguous()
    out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype, device=packed.device)
    units, device = out.numel() * out.element_size() // 16, packed.get_device()
    parameters = DequantizeArguments(packed.data_ptr(), scale.data_ptr(), out.data_ptr(), units)
    nvrtc.launch(_dequantize_kernel(dtype, device), (-(-units // (256 * EACH)),), 256, 0, parameters, device)
    return out
