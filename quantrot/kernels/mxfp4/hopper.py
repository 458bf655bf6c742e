"""Few tokens by a packed MXFP4 weight on Hopper: CUDA C++ (decode.cuh), compiled at first use.

Order of sums: the tensor core's in float32 along the columns that a team takes, 256 at a time in turn (of one token
exact ones of a group, which are multiplied by its scale and added up); then the teams' and the cluster's blocks' in
their order. A token's bits do not depend on its neighbours, as long as the plan is the same; nor on stages, nor on
which kernel quantized it.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import Fp8ScaleRule
from quantrot.kernels.mxfp4 import tuned
from quantrot.kernels.mxfp4.reference import GROUP, QUEST_SQUARE, ScaleRule, float32
from quantrot.kernels.nvrtc import SM_SHARED
from quantrot.kernels.ready import Run, address

OUT = {torch.bfloat16: "OutBf16", torch.float16: "OutFp16", torch.float32: "OutFp32"}
STEP = 128  # columns that are multiplied together, and the granule of K
CHUNK = 256  # columns of K in a stage
HELD_STEP = 576  # bytes of CHUNK columns of one token: two for each, and powers of two of its groups
ZEROS, SQUARES = 16, 128  # bytes of shared memory that one token takes beside itself: zeros, and for norm and scale
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap scale, const __grid_constant__ quantrot::DecodeArgs args) {{
  quantrot::decode<quantrot::Plan<{shape}>, quantrot::{out}, {span}, quantrot::{rule}, {norm}, {add}>(
      &codes, &wide, &scale, args);
}}
"""
ARRANGE = """extern "C" __global__ void __launch_bounds__({threads}) {name}(
    const __grid_constant__ quantrot::ArrangeArgs args) {{
  quantrot::arrange<{threads}, {words}, {shares}, {span}, quantrot::{rule}, quantrot::{laid}, quantrot::{front}>(args);
}}
"""
Box = tuple[int, int, int]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """tiles of eight tokens, 0 for one token; rows of a warp in units of 16; warps along the rows; teams of so many
    warps, which take turns along K; stages of CHUNK columns in shared memory, a multiple of the teams; thread blocks of
    a cluster that share a tile's K; whether a thread block has one tile only; thread blocks of a multiprocessor;
    whether four warps multiply at once (wgmma) by tokens that a kernel before lays down for that."""

    tiles: int
    tall: int
    row_warps: int
    teams: int
    stages: int
    split: int = 1
    once: bool = False
    resident: int = 1
    grouped: bool = False

    @property
    def threads(self) -> int:
        return 32 * (self.row_warps * self.teams + 1)

    @property
    def rows(self) -> int:
        return 16 * self.tall * self.row_warps

    @property
    def tokens(self) -> int:
        """Most tokens."""
        return 8 * self.tiles or 1

    def chunks(self, columns: int) -> int:
        """Stages that a thread block has to do."""
        return -(-columns // (CHUNK * self.split * self.teams)) * self.teams

    def shared_bytes(self, columns: int) -> int:
        wide = 4096 * self.tiles + (0 if self.grouped else 1024) if self.tiles else 0
        ring = self.stages * (self.rows * 144 + wide + 16)
        sums = 0 if self.once else self.teams * self.tokens * (self.rows + 4) * 4
        return ring + sums + (0 if self.tiles else self.chunks(columns) * HELD_STEP + ZEROS + SQUARES)

    def grid(self, rows: int, processors: int) -> int:
        tiles = -(-rows // self.rows)
        return (tiles if self.once else min(tiles, processors * self.resident)) * self.split

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Rows, columns and swizzle in bytes of what the copy engine moves: codes, more tokens than one, scales."""
        return (self.rows, 128, 128), (8 * self.tiles, 64, 128), (self.rows, 16, 0)


PROCESSORS = 132  # of the device that the rule is for
SPLIT_COLUMNS = 4096  # fewest that a cluster shares by rule
ROOM, DEEP = 220 << 10, 6  # most bytes of shared memory, and stages a team, by rule
# Tiles by rule: rows of a warp in 16s, warps along the rows, teams; and microseconds that 256 columns of K of one take
# with one token, 8, 16 and 32. Beside them: of such a product (W4A4, what turns the tokens included), of a row of its
# tiles, of a cluster's exchange. Fitted to the 29 linears of seven models (Llama 3, Qwen2.5) on an H200, where the
# model's choice takes 2 % longer than the fastest plan, in the mean.
TILES: dict[Shape, tuple[float, float, float, float]] = {
    (1, 1, 8): (0.158, 0.220, 0.227, 0.264),
    (2, 1, 8): (0.171, 0.243, 0.288, 0.345),
    (1, 2, 4): (0.171, 0.239, 0.261, 0.307),
    (1, 2, 7): (0.165, 0.225, 0.250, 0.341),
    (1, 3, 4): (0.230, 0.337, 0.366, 0.431),
    (1, 4, 2): (0.275, 0.364, 0.408, 0.519),
    (2, 2, 4): (0.255, 0.345, 0.380, 0.595),
    (1, 5, 2): (0.362, 0.473, 0.530, 0.692),
    (1, 6, 2): (0.375, 0.470, 0.531, 0.698),
    (2, 3, 4): (0.349, 0.434, 0.512, 0.837),
    (2, 4, 2): (0.458, 0.575, 0.666, 0.919),
    (2, 7, 2): (0.810, 1.052, 1.259, 2.0),
}
STARTING, ROW, SPLITTING = (1.25, 2.0, 1.5, 1.95), (0.0, 0.025, 0.025, 0.025), 1.0
# Bytes with which no two thread blocks share a multiprocessor. Behind a kernel that turns tokens they else meet on one:
# 8 tokens by 10240 x 8192 took 31 us, and take 19 alone.
ALONE = SM_SHARED // 2
MAPPED_ROWS = 64  # of a tile of more than one token whose scales the copy engine takes
NORM_PARTS = 8  # of eight numbers of a token that a thread may norm: they stay in registers
MOST_THREADS, REDUCED = 1024, 256  # of a block that arranges; bytes of its warps' sums and largest numbers


def tiles_of(tokens: int) -> int:
    """Tiles of eight tokens that the kernel is made for; 0 for one token."""
    return 0 if tokens == 1 else 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def fits(columns: int) -> bool:
    """Whether the kernel takes weights of so many columns."""
    return columns > 0 and columns % STEP == 0


def plan_of(tiles: int, rows: int, columns: int, shape: Shape, split: int = 1) -> Plan | None:
    """The plan for tiles of this shape, with as many stages as fit, up to DEEP a team; None where none does."""
    plan = Plan(tiles, *shape, stages=shape[2], split=split)
    blocks = -(-rows // plan.rows) * split
    plan = replace(plan, once=blocks <= PROCESSORS)
    sums = plan.teams * plan.tokens * (plan.rows + 4) * 4  # where there is one tile they take the ring's place
    for deep in range(min(DEEP, plan.chunks(columns) // plan.teams), 0, -1):
        plan = replace(plan, stages=plan.teams * deep)
        if plan.shared_bytes(columns) <= ROOM and (sums <= plan.shared_bytes(columns) or not plan.once):
            return plan if plan.once or split == 1 else None
    return None


def microseconds(plan: Plan, rows: int, columns: int) -> float:
    """The model's time of a plan of TILES."""
    turns = 1 if plan.once else -(-rows // (plan.rows * PROCESSORS))
    tokens = plan.tiles.bit_length()
    each = TILES[plan.tall, plan.row_warps, plan.teams][tokens]
    beside = STARTING[tokens] + ROW[tokens] * plan.rows + SPLITTING * (plan.split - 1)
    return beside + turns * plan.chunks(columns) * each


@lru_cache(maxsize=4096)
def rule(tokens: int, rows: int, columns: int) -> tuple[float, Plan]:
    """The plan of TILES that takes least by the model, and how long.

    More than 16 tokens may be shared by two blocks of a cluster where tiles are few, but not along fewer than 4096
    columns: 2048 x 2048 takes as long as 2048 x 8192 then, 9.3 us where bfloat16 takes 5.6.
    """
    tiles = tiles_of(tokens)
    splits = (1, 2) if tiles == 4 and rows <= 32 * PROCESSORS and columns >= SPLIT_COLUMNS else (1,)
    plans = [plan_of(tiles, rows, columns, shape, split) for shape in TILES for split in splits]
    if not any(plans):  # no block has room for so long a token
        return rule(8, rows, columns)
    return min(((microseconds(plan, rows, columns), plan) for plan in plans if plan), key=lambda found: found[0])


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, columns: int) -> Plan:
    """The measured plan (kept for 1, 8, 16 and 32 tokens; others take the next of these), else one by rule."""
    tiles = tiles_of(tokens)
    measured = tuned.HOPPER_DECODE.get((8 * tiles or 1, rows, columns))
    return Plan(tiles, *measured) if measured else rule(tokens, rows, columns)[1]


def norm_parts(plan: Plan, columns: int) -> int:
    """Parts of a token that a thread of the plan norms."""
    return -(-plan.chunks(columns) * CHUNK // (8 * (plan.threads - 32)))


def takes(tokens: int, rows: int, columns: int) -> bool:
    """Whether so many tokens by such a weight can have a norm or a gate in front of them and a residual behind them."""
    if not fits(columns) or rows % 4:
        return False
    plan = plan_for(tokens, rows, columns)
    return plan.tiles > 0 or (plan.split == 1 and norm_parts(plan, columns) <= NORM_PARTS)


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scale", "token_scale", "x", "norm", "residual", "y")),
        *((name, ctypes.c_float) for name in ("root", "epsilon")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "columns", "mapped", "settled")),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "scale")] + [("args", DecodeArgs)]


@dataclass(frozen=True)
class Turn:
    """What tokens become on their way: turned in blocks of `hadamard` (0, 32, 64, 128) and quantized to MXFP4 by
    `rule`; or, not turned, to e4m3 with a scale a token by an Fp8ScaleRule."""

    rule: ScaleRule | Fp8ScaleRule
    hadamard: int

    @property
    def root(self) -> float:
        return float32((self.hadamard or 1) ** -0.5)

    @property
    def codes(self) -> bool:
        """Whether e4m3's: the scale, which multiplies the result, needs all of a token."""
        return isinstance(self.rule, Fp8ScaleRule)


def turn_of(activations: str, rule: str, hadamard: int) -> Turn | None:
    """What tokens become for this kind of activations ("fp8", "mxfp4"; others are multiplied as they are)."""
    kinds: dict[str, Any] = {"mxfp4": ScaleRule, "fp8": Fp8ScaleRule}
    return Turn(kinds[activations](rule), hadamard) if activations in kinds else None


@dataclass(frozen=True)
class Arranging:
    """A kernel that tokens go through before the product: what they become there; how they lie then, "PLAIN", "GROUPED"
    in the order of wgmma's operands, or one token as its product holds it, "HELD"; and what is in front of that:
    "NORMED" (RMSNorm), "GATED" (silu of the first half of the columns times the second) or "NO_FRONT"."""

    turn: Turn | None
    laid: str = "PLAIN"
    front: str = "NO_FRONT"

    @property
    def shares(self) -> int:
        """Thread blocks a token. Each makes e4m3's scale for itself, of all of the token: 8 tokens by 4096 x 14336,
        silu(gate) * up in front, take 17.1 us with two and 18.8 with four; in MXFP4 16.5 and 16.4, 32 20.8 and 19.4."""
        return 2 if self.turn and self.turn.codes else 4

    def shape(self, columns: int) -> tuple[int, int]:
        """Threads of a block, and eights of a token's columns that each has room for, a multiple of the shares."""
        words = self.shares * -(-columns // (8 * self.shares * MOST_THREADS))
        return -(-columns // (8 * words * 32)) * 32, words

    def result(self, columns: int) -> tuple[int, torch.dtype]:
        """What it writes of a token of so many columns: numbers of this dtype."""
        return (columns + columns // 8, torch.uint8) if self.laid == "HELD" else (columns, torch.bfloat16)


def inside(plan: Plan, turn: Turn | None) -> Turn | None:
    """What the product's thread blocks make of one token, each for itself: where they hold it, in e4m3 all of it."""
    return turn if turn and not plan.tiles and (plan.split == 1 or not turn.codes) else None


def before(plan: Plan, turn: Turn | None, normed: bool = False, gated: bool = False) -> Arranging | None:
    """The kernel before the product, if there is one; one token is normed by the product."""
    own = inside(plan, turn)
    front = "GATED" if gated else "NORMED" if normed and plan.tiles else "NO_FRONT"
    if own and gated and plan.split == 1 and not own.codes:  # a layer of one token 40.3 us for 42.0
        return Arranging(own, "HELD", front)
    needed = plan.grouped or own is not turn or front != "NO_FRONT"
    return Arranging(None if own else turn, "GROUPED" if plan.grouped else "PLAIN", front) if needed else None


def template_of(turn: Turn | None) -> dict[str, Any]:
    """`span` and `rule` of the entries."""
    if turn is None:
        return {"span": 0, "rule": "AS_IS"}
    kind = "FP8_" if turn.codes else ""
    return {"span": turn.hadamard // GROUP, "rule": kind + str(turn.rule).upper()}


def group_functions() -> str:
    """The C++ of a group: its power of two, and what it rounds to."""
    square = struct.unpack("I", struct.pack("f", QUEST_SQUARE))[0]
    constant = f"#define QUEST_SQUARE __uint_as_float({square:#x}u)\n"
    return nvrtc.sources("hopper", "products") + constant + nvrtc.sources("mxfp4/group")


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return group_functions() + nvrtc.sources(
        "mxfp4/gated", "mxfp4/tokens", "mxfp4/held", "mxfp4/arrange", "mxfp4/decode"
    )


def entry(
    plan: Plan,
    out: torch.dtype,
    turn: Turn | None = None,
    norm: int = 0,
    add: bool = False,
    held: bool = False,
    name: str = "mxfp4_decode",
) -> str:
    """C++ of the kernel `name`. norm: parts of the token that a thread norms, 0: none; add: a residual; held: one token
    comes as "HELD"."""
    once, grouped = (str(flag).lower() for flag in (plan.once, plan.grouped))
    warps = plan.tall, plan.row_warps, plan.teams, plan.stages
    shape = (plan.tiles, *warps, plan.split, once, grouped)
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.split}, 1, 1) " if plan.split > 1 else "",
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        shape=", ".join(map(str, shape)),
        out=OUT[out],
        norm=norm,
        add=str(add).lower(),
        **({"span": 0, "rule": "AS_HELD"} if held else template_of(inside(plan, turn))),
    )


def maps_scale(plan: Plan, scale: Tensor) -> bool:
    """Whether the copy engine takes the scales, which it can from rows that are multiples of 16 bytes.

    It takes 16 bytes of a row for each stage. Where rows are few, copies by a warp cost less, if tokens come the same
    way: 16 tokens by 4096 x 14336 in tiles of 32 rows take 14.6 us in place of 17.2. 32 tokens by 28672 x 4096, tiles
    of 128, take 31.1 and 29.2. A layer of one token takes 36.5 with the copy engine, 36.8.
    """
    return scale.shape[1] % 16 == 0 and (plan.tiles == 0 or plan.rows >= MAPPED_ROWS)


def arguments(
    plan: Plan,
    x: Tensor,
    token_scale: Tensor | None,
    scale: Tensor,
    y: Tensor,
    turn: Turn | None,
    settled: bool,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
) -> DecodeArgs:
    """The kernel's last parameter; x [tokens, columns], y [tokens, rows]."""
    pointers = (None if t is None else t.data_ptr() for t in (scale, token_scale, x, norm, residual, y))
    numbers = (turn.root if turn else 1.0, epsilon, *y.shape, scale.shape[1] * GROUP)
    return DecodeArgs(*pointers, *numbers, int(maps_scale(plan, scale)), int(settled))


def matrices(plan: Plan, packed: Tensor, tokens: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
    """What the copy engine reads, in the order of the plan's boxes, None where it does not: one token."""
    return packed, tokens if plan.tiles else None, scale if maps_scale(plan, scale) else None


@lru_cache(maxsize=1024)
def _kernel(
    plan: Plan, out: torch.dtype, turn: Turn | None, shared: int, device: int, norm: int, add: bool, held: bool
) -> int:
    source = device_functions() + entry(plan, out, turn, norm, add, held)
    return nvrtc.load_kernel(source, "mxfp4_decode", shared, device)


def arrange_entry(columns: int, arranging: Arranging, name: str = "mxfp4_arrange") -> str:
    """C++ of the kernel `name`, for tokens of about so many columns."""
    threads, words = arranging.shape(columns)
    return ARRANGE.format(
        name=name,
        threads=threads,
        words=words,
        shares=arranging.shares,
        laid=arranging.laid,
        front=arranging.front,
        **template_of(arranging.turn),
    )


@lru_cache(maxsize=256)
def _arrange_kernel(columns: int, arranging: Arranging, device: int) -> int:
    source = device_functions() + arrange_entry(columns, arranging)
    return nvrtc.load_kernel(source, "mxfp4_arrange", REDUCED, device)


class ArrangeArguments(ctypes.Structure):
    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "y", "scales")),
        *((name, ctypes.c_float) for name in ("root", "epsilon")),
        *((name, ctypes.c_int) for name in ("columns", "settled")),
    ]


def arrange_arguments(
    x: Tensor,
    columns: int,
    y: Tensor | None,
    scales: Tensor | None,
    turn: Turn | None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    settled: bool = False,
) -> ArrangeArguments:
    pointers = (None if t is None else t.data_ptr() for t in (x, norm, y, scales))
    return ArrangeArguments(*pointers, turn.root if turn else 1.0, epsilon, columns, int(settled))


def arrange(
    x: Tensor,
    columns: int,
    arranging: Arranging,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    settled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Tokens [M, columns], or gate and up side by side, as the product reads them, bfloat16 [M, columns], uint8 [1,
    columns * 9 / 8] where one is held; of e4m3's codes, which a scale is to multiply, also the float32 scales [M]."""
    return prepare_arranging(x, columns, arranging, norm, epsilon, settled)(x, norm)


def prepare_arranging(
    x: Tensor, columns: int, arranging: Arranging, norm: Tensor | None, epsilon: float, settled: bool
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """`arrange` of tokens and a norm like these, as a function of them."""
    device, turn, count = x.get_device(), arranging.turn, len(x)
    width, dtype = arranging.result(columns)
    made: Any = {"size": (count, width), "dtype": dtype, "device": x.device}
    its_scales: Any = {"size": (count,), "dtype": torch.float32, "device": x.device} if turn and turn.codes else None
    values = arrange_arguments(x, columns, None, None, turn, norm, epsilon, settled)
    function, threads = _arrange_kernel(columns, arranging, device), arranging.shape(columns)[0]
    launch = nvrtc.Launch(function, (count * arranging.shares,), threads, REDUCED, device, overlap=True)

    def run(x: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, now = torch.empty(**made), ArrangeArguments.from_buffer_copy(values)
        scales = torch.empty(**its_scales) if its_scales else None
        now.x, now.norm, now.y, now.scales = x.data_ptr(), address(norm), y.data_ptr(), address(scales)
        launch(now)
        return y, scales

    return run


def aligned(x: Tensor) -> Tensor:
    """x, or a copy that is contiguous and starts at 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def decode(
    tokens: Tensor,
    token_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    plan: Plan | None = None,
    *,
    turn: Turn | None = None,
    settled: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """tokens bfloat16 [M, K] by a packed weight [N, K/2]: [M, N] in dtype; M from 1 to 32, K a multiple of 128.

    token_scale: float32 [M], multiplies each token's result, or None. Products are exact for group scales from 2^-62
    to 2^65, numbers of a single token up to 2^118. A single token that is not MXFP4 is rounded: a number of it loses at
    most 1/32640 of the largest of its group of 32.
    turn: what the tokens become first; in e4m3 their scales, which are made with them, take token_scale's place.
    settled: no kernel that may still run when this one is launched writes the weight, so that it is read before the
    kernel before this one has ended.
    norm [K], residual [M, N], bfloat16, contiguous, at multiples of 16 bytes, where a weight `takes` so many tokens:
    they go through RMSNorm first; residual is added to the rounded result. settled speaks of norm, too.
    gated, without norm: tokens are [M, 2 K], gate and up side by side; silu(gate) * up is multiplied.
    """
    beside: Any = norm, epsilon, residual, gated
    run = prepare(tokens, packed, scale, dtype, plan, turn, settled, *beside)
    return run(tokens, token_scale, packed, scale, norm, residual)


def prepare(
    tokens: Tensor,
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    plan: Plan | None = None,
    turn: Turn | None = None,
    settled: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Run:
    """`decode` of operands like these, as a function of tokens, token_scale, packed, scale, norm and residual."""
    given = packed, scale
    packed, scale = aligned(packed), aligned(scale)
    settled = settled and packed is given[0] and scale is given[1]
    count, (rows, columns), device = len(tokens), (len(packed), packed.shape[1] * 2), tokens.get_device()
    plan = plan or plan_for(count, rows, columns)
    first, held = None, False
    if arranging := before(plan, turn, norm is not None, gated):
        held = arranging.laid == "HELD"
        first, norm = prepare_arranging(tokens, columns, arranging, norm, epsilon, settled), None
    made: Any = {"size": (count, rows), "dtype": dtype, "device": tokens.device}
    sizes = torch.empty(count, rows, device="meta")
    values = _Arguments(args=arguments(plan, tokens, None, scale, sizes, turn, settled, norm, epsilon, residual))
    codes_box, wide_box, scale_box = plan.boxes
    map_codes, map_scale = nvrtc.map_of(packed, codes_box), nvrtc.map_of(scale, scale_box)
    maps_its_scale = maps_scale(plan, scale)
    like_wide = torch.empty(count, columns, dtype=tokens.dtype, device="meta")
    map_wide = nvrtc.map_of(like_wide, wide_box) if plan.tiles else None
    grid, shared = (plan.grid(rows, nvrtc.processors(device)),), plan.shared_bytes(columns)
    if first:
        shared = max(shared, ALONE)
    flags = 0 if norm is None else norm_parts(plan, columns), residual is not None, held
    function = _kernel(plan, dtype, None if held else inside(plan, turn), shared, device, *flags)
    launch = nvrtc.Launch(function, grid, plan.threads, shared, device, overlap=True)

    def run(
        tokens: Tensor, token_scale: Any, packed: Tensor, scale: Tensor, norm: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        read, packed, scale = aligned(tokens), aligned(packed), aligned(scale)
        y, now = torch.empty(**made), _Arguments.from_buffer_copy(values)
        if first:
            read, found = first(read, norm)
            norm, token_scale = None, token_scale if found is None else found
        args = now.args
        args.scale, args.token_scale, args.x = scale.data_ptr(), address(token_scale), read.data_ptr()
        args.norm, args.residual, args.y = address(norm), address(residual), y.data_ptr()
        ctypes.memmove(now.codes, map_codes(packed), 128)
        if map_wide:
            ctypes.memmove(now.wide, map_wide(read), 128)
        if maps_its_scale:
            ctypes.memmove(now.scale, map_scale(scale), 128)
        launch(now)
        return y

    return run
