"""How a mixed product is divided on Hopper: what a kernel is compiled for, and the plan of a size, by rule."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch

from quantrot.kernels.mixed.norm import VECTORS, WIDE
from quantrot.kernels.mixed.tuned import APART, CYCLES, DECODE, TURN
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED

NUMBERS = WIDE | {torch.float32: "Fp32"}
BLOCK = 64  # columns of K in a stage
STEP = 4  # blocks that every part of K but the last has a multiple of
FEW = 16  # tokens, up to which what a layer has around a product may be in its kernels
MORE = 32  # up to which a product is Decode's by rule
SOME = 48  # and up to which it is so where one wave of tiles has all rows
CHUNK = 128  # columns of K in a stage of Decode
AHEAD = 64 << 10  # bytes of codes asked for before a token that is normed, which would arrive behind more
Box = tuple[int, int, int]


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for, beside its plan."""

    kind: str  # of codes
    wide: torch.dtype
    weight: bool  # the weight is narrow
    group: int  # blocks of 64 columns that are summed before they are scaled: 0 (all), 1 or 2
    zero: bool
    scale: torch.dtype
    bias: torch.dtype | None

    def operands(self) -> str:
        bias = "None" if self.bias is None else NUMBERS[self.bias]
        flags = [str(flag).lower() for flag in (self.weight, self.zero)]
        return (
            f"quantrot::Operands<quantrot::{self.kind.upper()}, quantrot::{WIDE[self.wide]}, {flags[0]}, {self.group}, "
            f"{flags[1]}, quantrot::{NUMBERS[self.scale]}, quantrot::{bias}>"
        )


@dataclass(frozen=True)
class Plan:
    """Tiles of 64 * groups rows of the narrow operand by `columns` of the wide one.

    teams: of `groups` warpgroups; each takes a part of a tile's K, and a tile has one thread block, or with `split` a
    cluster of two, that halve K (parts.cuh). 0: persistent thread blocks (gemm.cuh). Clusters of four thread blocks
    took twice the time of those of two on an H200, in every product.
    """

    columns: int
    teams: int = 0
    split: int = 1  # thread blocks of a cluster that share K
    share: int = 1  # and that share the wide tile, each with its own rows
    groups: int = 2  # warpgroups that multiply
    odd: bool = False  # an odd number of rows of tiles: the last one's go to clusters as neighbours in columns
    halves: bool = True  # two products of 16 columns at a time
    blocks: int = 1  # of 64 columns of K in a stage
    stages: int = 0  # blocks of K in shared memory, of a team; 0: as many as fit
    apart: int = 1  # clusters that halve K, through memory
    resident: ClassVar[int] = 1  # thread blocks a multiprocessor
    tile_group: int = 8  # rows of tiles that run together

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def cluster(self) -> int:
        return self.split * self.share

    @property
    def heavy(self) -> bool:
        """Whether the loading warps give registers away."""
        return self.teams > 0 or self.groups > 1

    @property
    def threads(self) -> int:
        return 128 * self.groups * max(self.teams, 1) + (128 if self.heavy else 32)

    @property
    def depth(self) -> int:
        """Stages."""
        fit = min(24, (MAX_SHARED - 1024 - self._output()) // self._stage())
        return self.stages or fit // max(self.teams, 1)

    def _stage(self) -> int:
        return self.blocks * (self.rows * 64 + self.columns * 128) + 16

    def _output(self) -> int:
        if self.teams:
            return self.groups * self.teams * (128 * self.own[0] * self.split + 8)
        return self.groups * 64 * (self.own[0] + self.own[0] % 32) * 2

    def shared_bytes(self) -> int:
        return self.depth * max(self.teams, 1) * self._stage() + self._output()

    def call(self, kernel: Kernel) -> str:
        how = ", ".join(str(flag).lower() for flag in (self.odd, self.halves))
        if self.teams:
            how += f", {self.teams}, {self.blocks}, {self.apart}"
        tile = f"quantrot::Tile<{self.groups}, {self.columns}, {self.depth}, {self.split}, {self.share}, {how}>"
        operands = kernel.operands()
        return f"{'parts' if self.teams else 'prefill'}<{tile}, {operands}>(&codes, &wide, &y, args)"

    def grid(self, rows: int, columns: int, processors: int) -> int:
        tiles = self.tiles(rows, columns)
        return (tiles * self.apart if self.teams else min(tiles, processors // self.share)) * self.cluster

    def tiles(self, rows: int, columns: int) -> int:
        """Of clusters."""
        down, across = _ceil(rows, self.rows), _ceil(columns, self.columns)
        if not self.odd:
            return _ceil(down, self.share) * across
        return down // self.share * across + _ceil(down % self.share * across, self.share)

    def segment(self, depth: int) -> int:
        """Blocks of K in a part, a multiple of STEP."""
        return _ceil(_ceil(_ceil(depth, BLOCK), self.parts), STEP) * STEP

    def splits(self, depth: int) -> bool:
        """Whether every part has some of K."""
        return self.segment(depth) * (self.parts - 1) < _ceil(depth, BLOCK)

    @property
    def parts(self) -> int:
        """Of K."""
        return self.split * max(self.teams, 1) * self.apart

    @property
    def passes(self) -> int:
        """Products of the same codes, which have 256 columns at most."""
        return 2 if self.columns > 256 else 1

    @property
    def own(self) -> tuple[int, int]:
        """Columns and rows of y that a warpgroup stores at a time."""
        return self.columns // (self.split * self.teams if self.teams else self.passes), 64

    def box(self, columns: int) -> int:
        """Rows of the wide operand that one copy brings, of so many: no more than there are (start_of in hopper.cuh).
        Shares are whole groups of eight."""
        pieces = max(self.share, self.passes)
        share = columns if pieces == 1 else _ceil(_ceil(columns, pieces), 8) * 8
        return min(self.columns // pieces, share)

    def boxes(self, columns: int, weight: bool) -> tuple[Box, ...]:
        """Rows, columns and swizzle, in bytes, of what the copy engine moves of the codes, the wide operand and y."""
        y = (self.own[0], 64, 128) if weight else (64, 32, 64)
        return (self.rows, 64 * self.blocks, 64 * self.blocks), (self.box(columns), 64, 128), y


@dataclass(frozen=True)
class Decode:
    """Tiles of 16 * height * row_warps rows of the weight by all tokens, all of K, in persistent thread blocks.

    With `split` a cluster takes a tile, and its thread blocks share K.
    """

    tokens: int  # in eights, at most 8; 0: one token
    row_warps: int = 2
    teams: int = 4  # of so many warps, that take turns along K
    height: int = 1
    stages: int = 8  # of CHUNK columns of K in shared memory, a multiple of teams
    keep: int = 0  # columns of K for which shared memory holds all tokens, read once; 0: they come with the codes
    resident: int = 1  # thread blocks a multiprocessor
    split: int = 1
    gated: bool = field(default=False, kw_only=True)  # the weight is gate over up: y is silu(gate) * up
    norm: int = field(default=0, kw_only=True)  # the token goes through RMSNorm: vectors of 16 bytes a thread, 0: not
    add: bool = field(default=False, kw_only=True)  # a residual
    ahead: int = field(default=0, kw_only=True)  # stages asked for before the kernel before this one ended; 0: all

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def rows(self) -> int:
        return 16 * self.height * self.row_warps

    @property
    def columns(self) -> int:
        """Most tokens."""
        return max(8 * self.tokens, 1)

    @property
    def threads(self) -> int:
        return 32 * (self.row_warps * self.teams + 1)

    @property
    def depth(self) -> int:
        """Stages."""
        return self.stages

    def _sums(self) -> int:
        return self.teams * self.columns * (self.rows + 4) * 4

    def _chunks(self, depth: int) -> int:
        return _ceil(_ceil(depth, CHUNK), self.teams) * self.teams

    def shared_bytes(self) -> int:
        chunks = self._chunks(self.keep) if self.keep else self.stages
        head = self.stages * (self.rows * CHUNK + 16) + self._sums()
        return _ceil(head, 1024) * 1024 + chunks * self.columns * 2 * CHUNK

    def fitted(self) -> "Decode":
        """The same with as many stages as fit in shared memory, 32 at most."""
        room = SM_SHARED // self.resident - 1024 * (self.resident - 1) if self.resident > 1 else MAX_SHARED
        free = room - 1024 - self._sums() - (self._chunks(self.keep) * self.columns * 2 * CHUNK if self.keep else 0)
        stage = self.rows * CHUNK + 16 + (0 if self.keep else self.columns * 2 * CHUNK)
        return replace(self, stages=min(32, free // stage) // self.teams * self.teams)

    def normed(self, depth: int) -> "Decode":
        """The same with RMSNorm in front of a token of this size, and no more stages than then fit."""
        kept = replace(self, keep=depth)
        vectors = _ceil(kept._chunks(depth) * CHUNK // 8, self.threads - 32)
        return replace(kept, norm=vectors, stages=min(self.stages, kept.fitted().stages))

    def call(self, kernel: Kernel) -> str:
        keep, gated, add = (str(bool(flag)).lower() for flag in (self.keep, self.gated, self.add))
        tile = f"{self.tokens}, {self.height}, {self.row_warps}, {self.teams}, {self.stages}, {keep}, {self.split}"
        tile += f", {gated}, {self.norm}, {add}, {self.ahead or self.stages}"
        return f"decode<quantrot::Decode<{tile}>, {kernel.operands()}>(&codes, &wide, args)"

    def grid(self, rows: int, columns: int, processors: int) -> int:
        tiles = _ceil(rows >> self.gated, self.rows >> self.gated)
        return tiles * self.split if self.split > 1 else min(tiles, processors * self.resident)

    def segment(self, depth: int) -> int:
        """Columns of K in a part, in 128s, a multiple of the teams."""
        return _ceil(_ceil(_ceil(depth, CHUNK), self.split), self.teams) * self.teams

    def splits(self, depth: int) -> bool:
        """Whether the tokens that are kept fit, and every part has some of K."""
        if self.keep:
            return self.split == 1 and self._chunks(depth) <= self._chunks(self.keep)
        return self.segment(depth) * (self.split - 1) < _ceil(depth, CHUNK)

    def box(self, columns: int) -> int:
        """Tokens that one copy brings, of so many: 17 in boxes of 64 took 51 us where boxes of 17 take 27."""
        return min(self.columns, columns)

    def boxes(self, columns: int, weight: bool) -> tuple[Box, ...]:
        """Rows, columns and swizzle, in bytes, of what the copy engine moves of the codes and the wide operand."""
        wide = (self.box(columns), 64, 128) if self.tokens else (1, CHUNK, 0)
        return (self.rows >> self.gated, CHUNK, 128), wide, wide


# --- Plans -----------------------------------------------------------------------------------------------------------

PROCESSORS = 132  # of the device that the rules are for


def one_wave(rows: int) -> bool:
    """Whether every tile of 32 rows has a multiprocessor."""
    return rows <= 32 * PROCESSORS


@lru_cache(maxsize=4096)
def plan_for(rows: int, columns: int, depth: int, group: int, weight: bool) -> Plan | Decode:
    """The plan for R, C and K: as measured (`tuned`), or by rule. group: blocks that are summed before scaling, 0: all.

    By rule, what takes least by a model of tiles, turns and sums (CYCLES).
    """
    most = FEW if group == 1 else SOME if one_wave(rows) else MORE  # with groups of 64 these have too few registers
    if weight and columns <= most:
        return decode_plan(rows, columns, depth, group)
    plans = [plan for shape in CYCLES for plan in _plans(shape, rows, columns, depth, group, weight)]
    return min(plans, key=lambda plan: cycles(plan, rows, columns, depth, group))


def _plans(
    shape: tuple[int, int, int], rows: int, columns: int, depth: int, group: int, weight: bool
) -> Iterator[Plan]:
    """Those of a shape that can run. Two passes of narrow activations were not measured."""
    teams, groups, passes = shape
    for width in CYCLES[shape][0] if weight or passes == 1 else ():
        if not teams and (weight or groups == 2):
            share = 2 if rows > 64 * groups else 1
            odd, halves = _ceil(rows, 64 * groups) % share > 0, _halves(width, groups, columns, group, weight)
            yield Plan(width, share=share, groups=groups, odd=odd, halves=halves)
        for split, apart in ((1, 1), (2, 1), (2, 2)) if teams and weight else ():
            plan = Plan(width, teams, split, groups=groups, halves=width > 128 and groups < 3, apart=apart)
            if width % (16 * split * teams) or (plan.parts, groups) == (1, 2):  # that is one of the tiles above
                continue
            if apart > 1 and (width < 128 or groups * teams > 2):  # never the fastest
                continue
            if plan.grid(rows, columns, PROCESSORS) <= PROCESSORS and plan.splits(depth):
                yield _staged(plan, group)


def cycles(plan: Plan, rows: int, columns: int, depth: int, group: int) -> float:
    """The model's time of a product."""
    blocks, (scaling, more), rest, swap = CYCLES[plan.teams, plan.groups, plan.passes]
    block = blocks[plan.columns] + (scaling + more * plan.columns if group else 0)
    if not plan.teams:
        turns = _ceil(plan.tiles(rows, columns), PROCESSORS // plan.cluster)
        return turns * (depth / BLOCK * block + TURN) + rest
    apart = APART[0] + APART[1] * plan.rows * plan.columns if plan.apart > 1 else 0
    return plan.segment(depth) * block + rest + (swap if plan.split > 1 else 0) + apart


def _staged(plan: Plan, group: int) -> Plan:
    """With two teams of two warpgroups: stages twice as long, or with groups fewer ones, which leaves the first cache
    more of the scales."""
    if plan.teams != 2 or plan.groups != 2 or plan.columns != 128:
        return plan
    return replace(plan, stages=3) if group else replace(plan, blocks=2)


def _halves(width: int, groups: int, columns: int, group: int, weight: bool) -> bool:
    """Whether products start two by two: where that was faster for the width, and beside up to 1024 tokens."""
    if groups > 2:
        return True
    if group:
        return width > 128
    return width > 64 and not (weight and columns > 1024)


@lru_cache(maxsize=4096)
def token_plan(rows: int, depth: int, group: int, norm: bool, gated: bool, add: bool) -> Decode | None:
    """plan_for one token with a norm in front, a gate or a residual behind; None where the norm does not fit.

    On an H200 a layer of Llama 3.1 8B takes 62.0 us with AHEAD, 62.9 with all stages asked for early; with groups it is
    67.1 against 66.8.
    """
    plan = replace(decode_plan(rows, 1, depth, group), gated=gated, add=add)
    if not norm:
        return plan
    plan = plan.normed(depth)
    if plan.norm > VECTORS or plan.stages < 2 * plan.teams:
        return None
    return plan if group else replace(plan, ahead=min(plan.stages, AHEAD // (plan.rows * CHUNK)))


def decode_plan(rows: int, columns: int, depth: int, group: int) -> Decode:
    """The same for a few tokens."""
    known = DECODE.get((rows, depth, 64 * group, columns if columns == 1 else 8 * _ceil(columns, 8)))
    if known:
        return Decode(*known)
    tokens = 0 if columns == 1 else _ceil(columns, 8)
    if columns <= FEW and one_wave(rows) and group != 1:  # half of shared memory: the next kernel starts beside its end
        return replace(Decode(tokens, 2, 4, resident=2).fitted(), resident=1)
    if columns <= FEW or (tokens == 3 and one_wave(rows)):
        return Decode(tokens, 1, 8, 2).fitted()
    shapes = [Decode(tokens, 2, 4)]
    if not one_wave(rows):
        shapes = [Decode(tokens, 3, 4), Decode(tokens, 2, 4, 2), *([Decode(tokens, 7, 2)] if tokens > 3 else [])]
    return min(shapes, key=lambda plan: (_ceil(_ceil(rows, plan.rows), PROCESSORS) * plan.rows, -plan.rows)).fitted()
