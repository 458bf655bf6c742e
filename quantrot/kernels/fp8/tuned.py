"""How each shape is run: chosen by rule until `bench_fp8.py --tune` has measured it."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class RowPlan:
    """A program's rows, its groups in a row, and its warps."""

    rows: int
    groups: int
    warps: int


@dataclass(frozen=True)
class BlockPlan:
    """How a program takes a block, in pieces of rows x columns.

    words   four pieces, one below the other, packed in registers     16-bit values
    keep    one piece in registers
    again   as many pieces as it takes, `unroll` at a time; they are read twice, the second time from L1 or L2
    """

    kind: Literal["words", "keep", "again"]
    rows: int
    columns: int
    warps: int
    unroll: int = 1


def row_plan(group: int, rows: int, columns: int) -> RowPlan:
    """Of 1 x `group` blocks (a power of two)."""
    if group >= 4096:
        return RowPlan(1, 1, max(4, min(group // 1024, 16)))
    groups = min(4096 // group, 1 << max(-(-columns // group) - 1, 0).bit_length())
    return RowPlan(max(1, min(4096 // (group * groups), 1 << max(rows - 1, 0).bit_length())), groups, 4)


def block_plan(rows: int, columns: int, itemsize: int) -> BlockPlan:
    """Of blocks of rows x columns elements of itemsize bytes (powers of two, not below the block)."""
    size = rows * columns
    if itemsize == 2 and 4 <= rows <= 256 and 8192 <= size <= 65536 and columns <= 1024:
        return BlockPlan("words", rows // 4, columns, 32 if size > 32768 else size // 2048)
    if size <= 16384 and columns <= 1024:
        return BlockPlan("keep", rows, columns, max(1, min(8, size // 2048)))
    tall = min(rows, 32)
    return BlockPlan("again", tall, min(columns, 8192 // tall), 16, unroll=4)


@dataclass(frozen=True)
class TurnPlan:
    """Transformed rows a program takes at a time, how many times (with its matrices loaded once), and its warps."""

    rows: int
    loop: int
    warps: int


def turn_plan(size: int, elements: int) -> TurnPlan:
    """Of a Hadamard of `size` padded elements in front of a quantization of a tensor."""
    tile = 8192 if size == 128 else 4096
    rows = max(1, tile // size)
    loop = max(1, min(size // 16, elements // (tile * 528))) if size <= 128 else 1  # 528: four an H200's SM
    return TurnPlan(rows, loop, 4 if size <= 4096 else 8 if size <= 8192 else 16)


@dataclass(frozen=True)
class GemmPlan:
    """A product's tile [bm, bn], its warps and pipeline stages, and how the tiles are run.

    swap: the weight's rows are the tensor core's. group: rows of tiles that run together. tma: operands come by
    descriptors where they are aligned. persistent: programs a multiprocessor, each of which takes many tiles (0: one
    tile a program). splits: parts of K that are summed apart, in a second launch.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    swap: bool = False
    group: int = 8
    tma: bool = True
    persistent: int = 0
    splits: int = 1


def gemm_plan(m: int, n: int, k: int, both_rows: bool = False) -> GemmPlan:
    """Of [m, k] by [n, k]; both_rows: both with scales a row and a step, which take registers. Never splits K, and
    never changes the order of its sum: see triton_gemm.py."""
    if m <= 64:
        return GemmPlan(16 if m <= 16 else 32 if m <= 32 else 64, 64, 4, 8 if m <= 32 else 6, swap=True, group=1)
    if both_rows or m * n <= 128 * 128 * 132:  # one wave of large tiles would leave multiprocessors idle
        return GemmPlan(64, 128, 4, 4)
    return GemmPlan(128, 128, 8, 4)


def split_plan(m: int, n: int, k: int) -> GemmPlan:
    """The same, with K split where there are fewer tiles than an H200's multiprocessors can take."""
    plan = gemm_plan(m, n, k)
    tiles = -(-m // plan.bm) * -(-n // plan.bn)
    splits = 1
    while splits < 8 and tiles * splits < 2 * 132 and k >= 1024 * splits:
        splits *= 2
    return replace(plan, splits=splits, persistent=0)
