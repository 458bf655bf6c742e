"""How each shape is run: a line of the tables below where `bench_fp8.py --tune` has measured it, else by rule."""

from dataclasses import dataclass, replace
from typing import Literal

PROCESSORS = 132  # of the device that the rules are for, an H200


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


@dataclass(frozen=True)
class TurnPlan:
    """Transformed rows a program takes at a time, how often (with its matrices loaded once), and its warps."""

    rows: int
    loop: int
    warps: int


@dataclass(frozen=True)
class GemmPlan:
    """A product's tile [bm, bn], its warps and pipeline stages, and how the tiles are run.

    swap: the weight's rows are the tensor core's. group: rows of tiles that run together. tma: operands come by
    descriptors where the GPU has them. persistent: programs a multiprocessor, each of which takes many tiles (0: one
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


ROWS: dict[int, RowPlan] = {}  # group
BLOCKS: dict[tuple[int, int, int], BlockPlan] = {}  # block, bytes an element
TURNS: dict[tuple[int, int], TurnPlan] = {}  # padded order, bytes an element; loop is the most
GEMMS: dict[tuple[int, int, int], GemmPlan] = {}  # power of two from m up, n, k


def up(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def row_plan(group: int, rows: int, columns: int) -> RowPlan:
    """Of 1 x `group` blocks (a power of two)."""
    if group in ROWS:
        return ROWS[group]
    if group >= 4096:
        return RowPlan(1, 1, max(4, min(group // 1024, 16)))
    tile = 4096 if rows * columns >= 8192 * PROCESSORS else 1024  # few elements: spread over more programs
    groups = max(1, min(tile // group, up(-(-columns // group))))
    return RowPlan(max(1, min(tile // (group * groups), up(rows))), groups, max(1, tile // 1024))


def block_plan(rows: int, columns: int, itemsize: int) -> BlockPlan:
    """Of blocks of rows x columns elements of itemsize bytes (powers of two, not below the block)."""
    if (rows, columns, itemsize) in BLOCKS:
        return BLOCKS[rows, columns, itemsize]
    size = rows * columns
    if itemsize == 2 and 4 <= rows <= 256 and 8192 <= size <= 65536 and columns <= 1024:
        return BlockPlan("words", rows // 4, columns, 32 if size > 32768 else size // 2048)
    if size <= 16384 and columns <= 1024:
        return BlockPlan("keep", rows, columns, max(1, min(8, size // 2048)))
    tall = min(rows, 32)
    return BlockPlan("again", tall, min(columns, 8192 // tall), 16, unroll=4)


def turn_plan(size: int, elements: int, itemsize: int) -> TurnPlan:
    """Of a Hadamard of `size` padded elements in front of a quantization of a tensor of itemsize bytes an element."""
    plan = TURNS.get((size, itemsize))
    if plan is None:
        tile = 8192 if size == 128 else 4096
        plan = TurnPlan(max(1, tile // size), size // 16 if size <= 128 else 1, 8 if size <= 8192 else 16)
    most = elements // (plan.rows * size * 4 * PROCESSORS)  # four programs a multiprocessor, if there is so much
    return replace(plan, loop=max(1, min(plan.loop, most)))


def gemm_plan(m: int, n: int, k: int, both_rows: bool = False) -> GemmPlan:
    """Of [m, k] by [n, k]; both_rows: both with scales a row and a step, which take registers. Never splits K, and
    never changes the order of its sum: see triton_gemm.py."""
    if (up(m), n, k) in GEMMS and not both_rows:
        return GEMMS[up(m), n, k]
    if m <= 64:
        return GemmPlan(16 if m <= 16 else 32 if m <= 32 else 64, 64, 4, 8 if m <= 32 else 6, swap=True, group=1)
    if both_rows or m * n <= 128 * 128 * PROCESSORS:  # one wave of large tiles would leave multiprocessors idle
        return GemmPlan(64, 128, 4, 4)
    return GemmPlan(128, 128, 8, 4)


def split_plan(m: int, n: int, k: int) -> GemmPlan:
    """The same, with K split where there are fewer tiles than the multiprocessors take."""
    plan = gemm_plan(m, n, k)
    tiles = -(-m // plan.bm) * -(-n // plan.bn)
    splits = 1
    while splits < 8 and tiles * splits < 2 * PROCESSORS and k >= 1024 * splits:
        splits *= 2
    return replace(plan, splits=splits, persistent=0)
