"""The Hadamard transform for Hopper: CUDA C++ (*.cuh) compiled at first use and kept on disk.

One kernel a (Plan, order, dtype, signs, adjoint): the source is the device functions, the signs of the bases, and one
line that names the instance.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.hadamard import bases
from quantrot.kernels.nvrtc import MAX_SHARED, SM_REGISTERS, SM_SHARED, load_kernel, processors, tensor_map
from quantrot.kernels.ready import Run, address
from quantrot.orthogonal import hadamard_factors

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
STREAM_HINTS = '#define LOAD ".L1::no_allocate"\n#define STREAM ".cs"\n#define KEEP "first"\n'
CACHE_HINTS = '#define LOAD ""\n#define STREAM ""\n#define KEEP "normal"\n'
# Kinds whose large tensors are marked so: held 5120 takes 130 us at 2^27 and 147 unmarked, share 4096 129.2 and 126.7.
HINTED = ("held", "block", "dense", "axis")
STREAM_BYTES = 40 << 20  # input and output past this do not both fit in the 60 MB L2
SMALL_ELEMENTS = 1 << 18  # a tensor up to this is a few microseconds: how soon the first bytes come decides
LARGEST_POWER = 32768  # of two, in one kernel
WORDS = ("hadamard/words", "hadamard/columns")
FILES = {
    "lanes": (*WORDS, "hadamard/common", "hadamard/lanes"),
    **dict.fromkeys(("turn", "warp", "share"), (*WORDS, "hadamard/common", "hadamard/rows")),
    **dict.fromkeys(("block", "dense", "axis"), (*WORDS, "hadamard/common", "hadamard/bases")),
    "flow": ("hopper", "products", *WORDS, "hadamard/flow"),
    "twice": ("hopper", "products", *WORDS, "hadamard/flow", "hadamard/twice"),
    "stream": (*WORDS, "hadamard/common", "hadamard/stream"),
    "held": (*WORDS, "hadamard/common", "hadamard/held"),
}
FLOW_STAGE = 16 * 128  # bytes of shared memory through which a warp's results leave (flow)
COUNTERS = nvrtc.Counters()  # from which a kernel's blocks take rows
PROCESSORS = 132  # of an H200: which rows are asked for ahead of time; no result depends on it
ENTRY = """{counters}extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) hadamard({map_type}
    const void* x, void* y, const signed char* signs, long long rows, long long x_stride, long long y_stride,
    int sign_rows, float scale, float* scales, long long scale_row, long long scale_group, unsigned in_row,
    int counter) {{
  {wait}quantrot::{call}({map}{{x, y, signs, rows, x_stride, y_stride, sign_rows, scale, scales, scale_row, scale_group,
      in_row, {taken}}});
}}
"""
SCALE_RULES = ("exact", "bf16", "pow2")  # 1, 2, 3 in the kernels
GROUP = 128  # codes with one scale


@dataclass(frozen=True)
class Plan:
    """How one order is run.

    lanes   a row in one warp, or in `share` warps, by additions              any dtype, powers of two
    turn    32 ... 128 elements, one product                                  16 bits
    warp    256 ... 2048 elements in a warp, two products                     16 bits
    share   a row in a thread block's registers                               16 bits, 1024 ... 32768
    block   a base of at most 32 rows, persistent thread blocks               16 bits, K * 2^m
    dense   a larger base, and up to two small ones                           16 bits
    flow    one asynchronous product, rows through a ring of buffers          16 bits, K * 64, K * 128 or K * 256
    stream  32 ... 4096 elements as codes, a warp's pieces through a ring     16 bits
    twice   long rows as codes, two asynchronous products                     16 bits, K * 64, K * 128 or K * 256
    held    a row in a thread block's registers, 16 bits of K rows each       16 bits, K * 16, 64, 128 ... 1024
    axis    a base of a float32 tensor, one of several passes                 any
    """

    kind: Literal["lanes", "turn", "warp", "share", "block", "dense", "flow", "stream", "held", "axis", "twice"]
    warps: int  # a thread block
    resident: int  # thread blocks the compiler must leave room for on a multiprocessor
    vectors: int = 1  # 16-byte vectors a lane (lanes, turn, warp, share, stream), rows at a time (twice)
    share: int = 1  # warps that share a row (lanes)
    stages: int = 0  # input buffers (share: 0 is one row a block, no prefetch; dense: 0 is sums in the input's place)
    tiles: int = 8  # groups of eight columns: a warp's (block), a row's (flow, held); row tiles of a task (dense)
    part: int = 8  # neighbouring columns a lane finishes (block: 2, 4 or 8), column groups of a task (dense)
    precision: Literal["CUT", "SPLIT", "PAIR"] = "SPLIT"  # of the float32 product (warp, share, held): columns.cuh
    cluster: int = 1  # thread blocks that share a row (flow)
    paced: bool = False  # warpgroups multiply one after the other (flow)
    counted: bool = False  # thread blocks take rows as they come to them (twice)
    shift: bool = False  # the next row's tiles go to other warps (flow)
    overlap: bool = False  # launched while the kernel before it ends
    ahead: int = 0  # rows of so many thread blocks a multiprocessor further on come to L2 (held, lanes, share; overlap)
    later: int = 0  # the same, asked for when a block's own row has come (lanes of eight vectors or more; overlap)
    stream: bool = True  # cache hints (HINTED): mark the data as not used again soon

    @property
    def by_map(self) -> bool:
        """Whether the copy engine brings the rows by a tensor map."""
        return self.kind in ("flow", "twice")

    @property
    def counts(self) -> bool:
        """Whether thread blocks take rows from a counter."""
        return self.kind == "flow" or self.counted

    @property
    def maps(self) -> tuple[str, ...]:
        """The tensor maps that the kernel takes."""
        return {"flow": ("map",), "twice": ("map", "codes")}.get(self.kind, ())

    @property
    def arithmetic(self) -> tuple:
        """What a row's bits depend on: plans of one order that agree in this add in the same order and round alike.

        Rows whose length is a power of two are added lowest index bit first however they are divided, but for lanes of
        eight vectors or more, whose number comes before the lane's; only where rows cross between warps is the scale
        part of the last addition.
        """
        if self.kind == "lanes":
            return self.kind, self.share > 1, self.vectors * (self.share > 1 and self.vectors >= 8)
        if self.kind in ("warp", "share"):
            return self.kind, self.precision
        if self.by_map:
            return "flow", self.tiles
        if self.kind == "held":
            return "held", self.tiles, self.precision
        return (self.kind,) if self.kind in ("turn", "axis") else (self.kind, self.warps, self.tiles, self.part)

    def code_lines(self, order: int) -> int:
        """twice: lines of 128 codes that the copy engine stores at a time, of at most 16 rows of the base."""
        return next(rows for rows in (16, 8, 4) if order // (8 * self.tiles) % rows == 0) * self.tiles // 16

    def call(self, order: int, dtype: torch.dtype, signs: bool, out: torch.dtype) -> str:
        """The device function that runs this plan, with its template arguments."""
        d, flag = f"quantrot::{DTYPES[dtype]}", str(signs).lower()
        precision = f"quantrot::{self.precision}"
        if self.kind == "axis":
            return f"axis_kernel<{d}, quantrot::{DTYPES[out]}, {order}>"
        if self.kind == "flow":
            shape = f"{order // (8 * self.tiles)}, {8 * self.tiles}"
            extra = f"{self.warps // 4 - 1}, {self.stages}, {self.cluster}, {str(self.paced).lower()}, "
            return f"flow_kernel<{d}, {shape}, {extra}{str(self.shift).lower()}, {flag}>"
        if self.kind == "twice":
            shape = f"{order // (8 * self.tiles)}, {self.tiles // 8}, {self.vectors}, {self.warps // 4}"
            return f"twice_kernel<{d}, {shape}, {self.stages}, {str(self.counted).lower()}, {flag}>"
        if self.kind == "held":
            return f"held_kernel<{d}, {order // (8 * self.tiles)}, {8 * self.tiles}, {self.warps}, {precision}, {flag}>"
        if self.kind == "block":
            base = order // (8 * self.tiles * self.warps)
            return f"block_kernel<{d}, {base}, {self.tiles}, {self.warps}, {self.part}, {self.stages}, {flag}>"
        if self.kind == "dense":
            base, _, power = dense_shape(order)
            inner, over = order // base // power, str(self.stages == 0).lower()
            return (
                f"dense_kernel<{d}, {base}, {inner}, {power}, {self.warps}, {self.tiles}, {self.part}, {over}, {flag}>"
            )
        extra = {
            "stream": f"{self.stages}, ",
            "lanes": f"{self.share}, {PROCESSORS * self.later}, ",
            "turn": "",
            "warp": f"{precision}, ",
            "share": f"{self.stages}, {precision}, ",
        }[self.kind]
        return f"{self.kind}_kernel<{d}, {order}, {self.vectors}, {self.warps}, {extra}{flag}>"

    def bases(self, order: int, transpose: bool) -> str:
        """C++ for the signs of the bases that this plan needs."""
        if self.kind == "axis":
            return bases.axis_base(order, transpose)
        if self.by_map:
            return bases.flow_base(order, order // (8 * self.tiles), transpose)
        if self.kind == "held":
            return bases.held_base(order, order // (8 * self.tiles), transpose)
        if self.kind == "block":
            base = order // (8 * self.tiles * self.warps)
            return bases.block_base(base, transpose) if base & (base - 1) else ""
        if self.kind == "dense":
            base, small, power = dense_shape(order)
            return bases.dense_base(base, transpose) + bases.small_bases(base, small, order // base, power, transpose)
        return ""

    def source(
        self,
        order: int,
        dtype: torch.dtype,
        signs: bool,
        transpose: bool = False,
        out: torch.dtype | None = None,
        rule: str | None = None,
    ) -> str:
        """The text to compile; with a scale rule, of a kernel that writes codes."""
        return (
            (f"#define SCALE_RULE {SCALE_RULES.index(rule) + 1}\n" if rule else "")
            + (STREAM_HINTS if self.stream and self.kind in HINTED else CACHE_HINTS)
            + nvrtc.sources(*FILES[self.kind])
            + f"namespace quantrot {{\n{self.bases(order, transpose)}}}\n"
            + ENTRY.format(
                threads=self.warps * 32,
                resident=self.resident,
                call=self.call(order, dtype, signs, out or dtype),
                cluster=f"__cluster_dims__({self.cluster}, 1, 1) " if self.cluster > 1 else "",
                wait=self.wait(order, dtype),
                map_type="".join(f"const __grid_constant__ quantrot::TensorMap {name}," for name in self.maps),
                map="".join(f"{name}, " for name in self.maps),
                counters=COUNTERS.declaration if self.counts else "",
                taken="counter < 0 ? nullptr : counters + counter" if self.counts else "nullptr",
            )
        )

    def wait(self, order: int, dtype: torch.dtype) -> str:
        """The call that waits for the kernel before, of those that do not wait themselves."""
        if not self.overlap or self.by_map or self.kind == "stream" or (self.kind == "share" and self.stages):
            return ""
        if not self.ahead and not self.later:
            return "quantrot::grid_wait();\n  "
        size, wave = order * dtype.itemsize, PROCESSORS * (self.ahead or self.later)
        of_rows = f"<{size}, {self.rows_a_block}, {wave}, {str(self.ahead > 0).lower()}>"
        return f"quantrot::grid_wait_ahead{of_rows}(x, rows, x_stride * {dtype.itemsize});\n  "

    @property
    def rows_a_block(self) -> int:
        """held: a warp has one row or, of C = 16, four; or a thread block has one. share: a thread block has one."""
        return self.warps * (8 // self.tiles) if self.kind == "held" and self.tiles <= 8 else 1

    def shared_bytes(self, order: int) -> int:
        """Dynamic shared memory of a thread block."""
        if self.kind == "share":
            return order * (4 + 2 * self.stages) + (128 if self.stages else 0)
        if self.kind == "lanes" and self.share > 1:
            return order * 4
        if self.kind == "held":
            return self.tiles * 1024 if self.tiles > 8 else 0
        if self.kind == "stream":
            kept = max(order // 16, 32)  # scales of a warp
            return self.warps * (self.stages * self.vectors * 512 + 4 * kept)
        if self.kind == "block":
            columns = 8 * self.tiles * self.warps
            base = order // columns
            one_input = (base * (columns * 2 + 16) + 127) // 128 * 128
            return 128 + self.stages * one_input + base * (columns * 4 + 32)
        if self.kind == "twice":
            depth = -(-order // (8 * self.tiles) // 16) * 16
            a_column = self.stages * depth * 2 + self.warps * 16  # of the input and of codes
            barriers = 20 * self.stages + 2 * self.warps
            return a_column * self.vectors * 8 * self.tiles + 4096 + order // 4 + barriers
        if self.by_map:
            depth = -(-order // (8 * self.tiles) // 16) * 16
            one_input = depth * 16 * self.tiles + 16 + 4
            return self.stages * one_input + (self.warps - 4) * FLOW_STAGE + 8 * (self.warps // 4 - 1)
        if self.kind == "dense":
            base = dense_shape(order)[0]
            inputs = (base * (order // base * 2 + 16) + 127) // 128 * 128
            return 128 + base * (order // base * 4 + 32) + (inputs if self.stages else 0)
        return 0

    def takes(self, rows: Tensor) -> bool:
        """Whether rows [_, order] may lie apart as they do: a tensor map is of a matrix of 8 * tiles columns."""
        order = rows.shape[1]
        if not self.by_map or rows.stride(0) == order:
            return True
        return rows.stride(0) > order and rows.stride(0) % (8 * self.tiles) == 0

    def grid(self, rows: int, inner: int, order: int, dtype: torch.dtype, processors: int) -> int:
        """Thread blocks for this many rows (axis: of `inner` columns)."""
        if self.kind == "axis":
            return -(-rows * inner // 256)
        if self.kind == "twice":
            tiles = -(-rows // self.vectors)
            return min(tiles, processors * self.resident)
        if self.kind in ("block", "flow") or (self.kind == "share" and self.stages):
            return min(rows, processors * self.resident // self.cluster) * self.cluster
        if self.kind in ("share", "dense") or self.share > 1:
            return rows
        if self.kind == "held":
            return -(-rows // self.rows_a_block)
        a_warp = 32 * self.vectors * (16 // dtype.itemsize)
        blocks = -(-rows * order // (a_warp * self.warps))
        return min(blocks, processors * self.resident) if self.kind == "stream" else blocks


# --- Plans -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def plan_for(order: int, dtype: torch.dtype, small: bool = False) -> Plan | None:
    """The measured plan of this order (of a small tensor), else one by rule, else None: it is run in passes.

    A row has the same bits in a small tensor and in a large one.
    """
    from quantrot.kernels.hadamard.tuned import PLANS, SMALL_PLANS

    name = str(dtype).removeprefix("torch.")
    if small and (name, order) in SMALL_PLANS:
        return SMALL_PLANS[name, order]
    if (name, order) in PLANS:
        return PLANS[name, order]
    *bases, power = hadamard_factors(order)
    if dtype.itemsize == 4 or not bases or (order // bases[0]) % 16:
        return None
    return _block_plan(bases[0], power) if len(bases) == 1 and bases[0] <= 32 and power >= 16 else _dense_plan(order)


def _plan_of(order: int, dtype: torch.dtype, small: bool, stays: bool) -> Plan | None:
    """The plan for a tensor of this size: that of small ones also where only it overlaps and memory is no bound."""
    plan, other = plan_for(order, dtype), plan_for(order, dtype, small=True)
    sooner = plan and other and other.overlap > plan.overlap and other.warps * other.vectors >= 8  # 4 KiB a block
    return other if small or (stays and sooner) else plan


def _fitting(plan: Plan, order: int, registers: int) -> Plan | None:
    """The plan with as many resident blocks as shared memory and about this many registers a thread allow."""
    shared = plan.shared_bytes(order)
    resident = min(SM_SHARED // (shared + 1024), SM_REGISTERS // (plan.warps * 32 * registers), 64 // plan.warps, 16)
    return replace(plan, resident=resident) if resident and shared <= MAX_SHARED else None


def _block_plan(base: int, power: int) -> Plan | None:
    tiles = min(power // 8, 8 if base > 16 else 16)
    warps = power // 8 // tiles
    if warps > 16:
        return None
    part = 8 if warps <= 8 else 4
    return _fitting(Plan("block", warps, 1, tiles=tiles, part=part, stages=1), base * power, 120 if warps > 4 else 96)


def dense_shape(order: int) -> tuple[int, tuple[int, ...], int]:
    """(the largest base, the others, the power of two)."""
    *bases, power = hadamard_factors(order)
    return max(bases), tuple(sorted(bases, reverse=True)[1:]), power


def _dense_plan(order: int) -> Plan | None:
    base, small, power = dense_shape(order)
    groups, down = order // base // 8, -(-base // 16)
    if power > 256 or any(b > 32 for b in small):
        return None
    wide = next((w for w in (4, 6, 2) if groups % w == 0), None)
    tall = next(t for t in (5, 4, 3, 2, 1) if down % t == 0)
    if wide is None:
        return None
    tasks, sums = groups // wide * (down // tall), tall * wide * 4
    if tasks <= 20 and (plan := _fitting(Plan("dense", tasks, 1, tiles=tall, part=wide), order, sums + 48)):
        return plan
    return _fitting(Plan("dense", min(tasks, 16), 1, tiles=tall, part=wide, stages=1), order, sums + 48)


# --- Launch -----------------------------------------------------------------------------------------------------------


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("x_stride", ctypes.c_longlong),
        ("y_stride", ctypes.c_longlong),
        ("sign_rows", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("scales", ctypes.c_void_p),
        ("scale_row", ctypes.c_longlong),
        ("scale_group", ctypes.c_longlong),
        ("in_row", ctypes.c_uint),
        ("counter", ctypes.c_int),
    ]


class _FlowArguments(ctypes.Structure):
    _fields_ = [("map", ctypes.c_ubyte * 128), *_Arguments._fields_]


class _TwiceArguments(ctypes.Structure):
    _fields_ = [("map", ctypes.c_ubyte * 128), ("codes", ctypes.c_ubyte * 128), *_Arguments._fields_]


@lru_cache(maxsize=1024)
def _kernel(
    plan: Plan,
    order: int,
    dtype: torch.dtype,
    signs: bool,
    transpose: bool,
    out: torch.dtype,
    rule: str | None,
    device: int,
) -> Any:
    """The function, ready to launch on this device."""
    source = plan.source(order, dtype, signs, transpose, out, rule)
    return load_kernel(source, "hadamard", plan.shared_bytes(order), device)


def launch(
    x: Tensor,
    y: Tensor,
    signs: Tensor | None,
    scale: float,
    plan: Plan,
    *,
    transpose: bool = False,
    scales: Tensor | None = None,
    rule: str | None = None,
) -> None:
    """Transform the rows of x [rows, order] into y, which may be x. Contiguous columns, rows aligned to 16 bytes.

    axis: x and y are [rows, order, inner], contiguous and not the same. With a scale rule y holds e4m3 codes and
    scales [M, K / 128] theirs, K a multiple of the order.
    """
    if len(x):
        prepare(x, y, signs, scale, plan, transpose=transpose, scales=scales, rule=rule)(x, y, signs, scales)


def prepare(
    x: Tensor,
    y: Tensor,
    signs: Tensor | None,
    scale: float,
    plan: Plan,
    *,
    transpose: bool = False,
    scales: Tensor | None = None,
    rule: str | None = None,
) -> Run:
    """`launch` of one row or more, as a function of x, y, signs and scales like these."""
    rows, order, device, x_map, y_map = x.shape[0], x.shape[1], x.get_device(), None, None
    function = _kernel(plan, order, x.dtype, signs is not None, transpose, y.dtype, rule, device)
    inner = x.shape[2] if plan.kind == "axis" else 1
    numbers = (
        None,
        None,
        None,
        rows,
        inner if plan.kind == "axis" else x.stride(0),
        y.stride(0),
        signs.numel() // order if signs is not None else 1,
        scale,
        *((None, *scales.stride(), scales.shape[1]) if scales is not None else (None, 0, 0, 0)),
        -1,
    )
    structure = _TwiceArguments if plan.kind == "twice" else _FlowArguments if plan.by_map else _Arguments
    values = structure(**dict(zip((field[0] for field in _Arguments._fields_), numbers, strict=True)))
    if plan.by_map:
        base, columns = order // (8 * plan.tiles), 8 * plan.tiles
        tall = (rows - 1) * x.stride(0) // columns + base
        x_map = tall, columns, columns * x.itemsize, (base, 64), x.dtype
    if plan.kind == "twice":
        y_map = rows * order // GROUP, GROUP, GROUP, (plan.code_lines(order), GROUP), torch.uint8
    grid, counts = plan.grid(rows, inner, order, x.dtype, processors(device)), plan.counts
    launch = nvrtc.Launch(function, (grid,), plan.warps * 32, plan.shared_bytes(order), device, overlap=plan.overlap)

    def run(x: Tensor, y: Tensor, signs: Tensor | None, scales: Tensor | None) -> None:
        now = structure.from_buffer_copy(values)
        now.x, now.y, now.signs, now.scales = x.data_ptr(), y.data_ptr(), address(signs), address(scales)
        if counts and (counter := COUNTERS.first(device)) is not None:
            now.counter = counter
        if x_map:
            ctypes.memmove(now.map, tensor_map(x.data_ptr(), *x_map), 128)
        if y_map:
            ctypes.memmove(now.codes, tensor_map(y.data_ptr(), *y_map), 128)
        launch(now)

    return run


# Of tensors turned in place that L2 holds: rows need not be asked for, and persistent blocks with 16-byte stores win.
# 2^24 elements: 13.5 us; by the order's own plan 15.5, and 16.3 where it asks ahead.
IN_PLACE = {
    (torch.bfloat16, 16384): Plan("share", 8, 2, vectors=8, stages=1, precision="CUT", overlap=True),
    (torch.float16, 16384): Plan("share", 8, 2, vectors=8, stages=1, precision="PAIR", overlap=True),
}


# --- The operator ----------------------------------------------------------------------------------------------------


def transform(
    x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, into: Tensor | None = None
) -> Tensor:
    """x [..., k * order] -> a new contiguous tensor, or `into` (x itself, in place)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
    if x.numel() == 0:
        return y
    plan = _one_pass(x, order, into is not None)
    rows = read_rows(x, order, plan)
    if into is not None and rows.data_ptr() == x.data_ptr():
        out = rows
    else:
        out = (y if into is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)).view(-1, order)
    after = signs if transpose else None
    before = None if transpose or signs is None else signs.contiguous()
    if plan is not None:
        launch(rows, out, before, scale, plan, transpose=transpose)
    else:
        _passes(rows, out, before, order, scale, transpose)
    if into is not None and out is not rows:
        y.copy_(out.view(y.shape))
    if after is not None:
        y.mul_(after.repeat(x.shape[-1] // after.numel()))
    return y


def prepare_transform(x: Tensor, signs: Tensor | None, order: int, scale: float) -> Run | None:
    """`transform` of an x and contiguous signs like these into a new tensor, as a function of them; None where it takes
    more than one kernel."""
    plan = _one_pass(x, order, False) if x.numel() else None
    if plan is None:
        return None
    made: Any = {"size": x.shape, "dtype": x.dtype, "device": x.device}
    like_y = torch.empty(x.shape, dtype=x.dtype, device="meta").view(-1, order)
    turn = prepare(read_rows(x, order, plan), like_y, signs, scale, plan)

    def run(x: Tensor, signs: Tensor | None) -> Tensor:
        y = torch.empty(**made)
        turn(read_rows(x, order, plan), y.view(-1, order), signs, None)
        return y

    return run


def _one_pass(x: Tensor, order: int, in_place: bool) -> Plan | None:
    """The plan of one kernel for an x that is not empty, None where there is none."""
    size = x.dtype.itemsize
    if order * size % 16 and x.numel() * size % 16:
        return None
    stays = (1 if in_place else 2) * x.nbytes <= STREAM_BYTES  # in L2, input and output
    small = x.numel() <= SMALL_ELEMENTS
    plan = _plan_of(order, x.dtype, small, stays)
    if plan is None:
        return None
    if in_place and stays and not small:
        plan = IN_PLACE.get((x.dtype, order), replace(plan, ahead=0, later=0))
    marked = not stays and (not in_place or plan.kind == "held")  # block 10240 in place 165.6 us marked, 163.2 not
    return plan if marked else replace(plan, stream=False)


def read_rows(x: Tensor, order: int, plan: Plan | None) -> Tensor:
    """x as [rows, order], as the plan's kernel takes it."""
    rows = _rows(x, order)
    return rows if plan is None or plan.takes(rows) else rows.contiguous()


def _rows(x: Tensor, order: int) -> Tensor:
    """x as [rows, order], contiguous columns and 16-byte aligned rows; a copy only where x is not."""
    if x.is_contiguous():
        rows = x.view(-1, order)
    else:
        try:
            rows = x.view(-1, x.shape[-1])
        except RuntimeError:
            rows = x.contiguous().view(-1, order)
        if rows.shape[-1] != order or rows.stride(-1) != 1:
            rows = x.contiguous().view(-1, order)
    spaced = order * x.dtype.itemsize % 16 == 0 and rows.stride(0) * x.dtype.itemsize % 16 == 0
    aligned = rows.data_ptr() % 16 == 0 and (rows.is_contiguous() or spaced)
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


def _passes(x: Tensor, y: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> None:
    """One pass a base, the power of two first, float32 between them and one rounding at the end."""
    *bases, power = hadamard_factors(order)
    data = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if signs is not None:
        data.view(-1, signs.numel()).mul_(signs)
    while power > LARGEST_POWER or (power > 1 and power * 4 % 16):
        factor = min(power, max(2, power // LARGEST_POWER))
        bases.append(factor)
        power //= factor
    if power > 1:
        rows = data.view(-1, power)
        plan = plan_for(power, torch.float32)
        assert plan is not None, power
        launch(rows, rows, None, 1.0, plan)
    outer, inner = x.shape[0], order
    for i, base in enumerate(bases):
        inner //= base
        out = y.view(outer, base, inner) if i + 1 == len(bases) and y.is_contiguous() else torch.empty_like(data)
        last = i + 1 == len(bases)
        launch(
            data.view(outer, base, inner), out.view(outer, base, inner), None, scale if last else 1.0,
            Plan("axis", 8, 1), transpose=transpose,
        )  # fmt: skip
        data, outer = out, outer * base
    if not bases:
        y.copy_(data.mul_(scale))
    elif data.data_ptr() != y.data_ptr():
        y.copy_(data.view(y.shape))
