"""How a mixed product is divided among Triton programs, by rule.

Sizes are the kernels' (`triton`): R rows of the narrow operand, C of the wide one ("columns"), K ("depth").
"""

from dataclasses import dataclass

from quantrot.kernels.operators import HOPPER_SHARED

DECODE_COLUMNS = 16


@dataclass(frozen=True)
class Decode:
    """rows a program, slices of K (one warp each), columns of K a slice takes at a time, and how many loads ahead."""

    rows: int = 16
    slices: int = 4
    depth: int = 128
    stages: int = 4


@dataclass(frozen=True)
class Prefill:
    """A tile is rows x columns, fed `depth` of K at a time; K is split over `split` programs.

    bulk: the tensor memory accelerator copies, where there is one and the operands' rows are aligned to 16 bytes.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    split: int = 1
    bulk: bool = True


def plan_for(
    rows: int, columns: int, depth: int, group: int, narrow_weight: bool, processors: int, shared: int
) -> Decode | Prefill:
    """The plan for R, C and K. group: columns of K that share a scale, 0: all. narrow_weight: C counts tokens.

    processors: the GPU's; shared: bytes of shared memory that a program may have.
    """
    if narrow_weight and columns <= DECODE_COLUMNS:
        return decode_plan(rows, columns, group)
    return prefill_plan(rows, columns, depth, group, processors, shared)


def decode_plan(rows: int, columns: int, group: int) -> Decode:
    """By rule: K is shared out alike for any number of tokens, so that a token's bits depend on the weight alone; rows
    are few enough for two programs a multiprocessor, and many enough for the tokens' trips through L2."""
    few = 16 if columns == 1 or rows < 8192 else 32
    return Decode(rows=few, depth=128 if group % 128 == 0 else 64, stages=4 if few * columns <= 256 else 3)


def prefill_plan(
    rows: int, columns: int, depth: int, group: int, processors: int, shared: int = HOPPER_SHARED
) -> Prefill:
    """By rule: the largest tile that leaves every multiprocessor work, then a split of K.

    With groups, tiles small enough that a multiprocessor has two programs: one scales sums while the other multiplies.
    """
    wide = min(64 if group else 128, max(16, 1 << (columns - 1).bit_length()))
    tall, warps = (64, 4) if rows <= 64 else (128, 8)
    tiles = -(-rows // tall) * -(-columns // wide)
    if not group and tall == wide == 128 and tiles >= 4 * processors and shared >= HOPPER_SHARED:
        return Prefill(tall, 256, 64, warps, 4)
    step = 128 if group and group % 128 == 0 and shared >= HOPPER_SHARED else 64
    stages = max(2, min(4 if step == 64 else 3, shared // (step * (tall + 2 * wide))))
    split = 1
    while tiles * split * 2 <= 2 * processors and depth // (split * 2) >= 512 and split < 8:
        split *= 2
    return Prefill(tall, wide, step, warps, stages, split)
