"""Few tokens by a packed MXFP4 weight on Hopper: CUDA C++ (stream.cuh), compiled at first use.

Order of sums: the tensor core's in float32 along the columns that a team takes, 256 at a time in turn; then the teams'
and the cluster's blocks' in their order. A token's bits do not depend on its neighbours, as long as the plan is the
same.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper

CHUNK = 256  # columns of K in a stage
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::StreamArgs args) {{
  quantrot::stream<quantrot::Stream<{shape}>, quantrot::{out}>(&codes, &wide, args);
}}
"""
Box = tuple[int, int, int]


@dataclass(frozen=True)
class Stream:
    """tiles of eight tokens, 0 for one token; rows of a warp in units of 16; warps along the rows; teams of so many
    warps, which take turns along K; stages of CHUNK columns in shared memory, a multiple of the teams; thread blocks of
    a cluster that share a tile's K; whether a thread block has one tile only; thread blocks of a multiprocessor;
    whether a kernel before lays the tokens down in the order of the products."""

    tiles: int
    tall: int
    row_warps: int
    teams: int
    stages: int
    split: int = 1
    once: bool = False
    resident: int = 1
    arranged: bool = False

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

    def shared_bytes(self) -> int:
        wide = 4096 * self.tiles + (0 if self.arranged else 1024) if self.tiles else 512
        ring = self.stages * (self.rows * 136 + wide + 16)
        sums = self.teams * self.tokens * (self.rows + 4) * 4
        return ring if self.once else ring + sums

    def grid(self, rows: int, processors: int) -> int:
        tiles = -(-rows // self.rows)
        return (tiles if self.once else min(tiles, processors * self.resident)) * self.split

    def boxes(self) -> tuple[Box, Box]:
        """Rows, columns and swizzle, in bytes, of what the copy engine moves of the codes and of the tokens."""
        tokens = (16 * self.tiles, 128, 0) if self.arranged else (8 * self.tiles or 4, 64, 128)
        return (self.rows, 128, 128), tokens


PROCESSORS = 132  # of the device that the rule is for
ROOM = 104 << 10  # bytes of shared memory for the ring, where two stages of each team fit in it
MOST_ROOM = 220 << 10


def fits(tokens: int, columns: int) -> bool:
    """Whether the kernel takes products of this size."""
    return 0 < tokens <= 32 and columns > 0 and columns % 128 == 0


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, columns: int) -> Stream:
    """The plan by rule: tiles whose codes and tokens are the fewest bytes for the multiprocessor that has the most.

    From 9 tokens on, two blocks of a cluster may share a tile, so that a block reads half of the tokens.
    """
    tiles = 0 if tokens == 1 else 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    wide = 4096 * tiles + 1024 if tiles else 512
    best: tuple[float, int, int] | None = None
    for units in range(1, 17):
        for split in (1, 2) if tiles > 1 and columns >= 2048 else (1,):
            blocks = -(-rows // (16 * units)) * split
            if split > 1 and blocks > PROCESSORS:
                continue
            cost = -(-blocks // PROCESSORS) * (units * 2176 + wide) / split, -units, split
            if best is None or cost < best:
                best = cost
    assert best is not None
    units, split = -best[1], best[2]
    tall = 2 if units % 2 == 0 and units >= 4 else 1
    row_warps = units // tall
    teams = max(1, 8 // row_warps)
    stage = units * 2176 + wide + 16
    most = -(-columns // (256 * split))  # stages that there are to do
    teams = min(teams, most)
    once = split > 1 or -(-rows // (16 * units)) <= PROCESSORS
    sums = 0 if once else teams * (8 * tiles or 1) * (16 * units + 4) * 4
    stages = max(min((room - sums) // stage, most + teams - 1) // teams * teams for room in (ROOM, MOST_ROOM))
    return Stream(tiles, tall, row_warps, teams, max(stages, teams), split, once)


class StreamArgs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("scale", "token_scale", "y")] + [
        (name, ctypes.c_int) for name in ("tokens", "rows", "columns")
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide")] + [("args", StreamArgs)]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return hopper.device_functions() + (Path(__file__).parent / "stream.cuh").read_text()


def entry(plan: Stream, out: torch.dtype, name: str = "mxfp4_stream") -> str:
    """C++ of the kernel `name`."""
    flags = [str(flag).lower() for flag in (plan.arranged, plan.once)]
    shape = (plan.tiles, flags[0], plan.tall, plan.row_warps, plan.teams, plan.stages, plan.split, flags[1])
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.split}, 1, 1) " if plan.split > 1 else "",
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        shape=", ".join(map(str, shape)),
        out=hopper.OUT[out],
    )


def arguments(token_scale: Tensor | None, scale: Tensor, y: Tensor) -> StreamArgs:
    """The kernel's last parameter; y [tokens, rows]."""
    pointers = (None if t is None else t.data_ptr() for t in (scale, token_scale, y))
    return StreamArgs(*pointers, *y.shape, scale.shape[1] * 32)


def matrix_of(tokens: Tensor, plan: Stream) -> Tensor:
    """Tokens as the copy engine takes them: one as rows of 64, those that `hopper.arrange` laid down as rows of 128."""
    return tokens.view(-1, 64) if plan.tiles == 0 else tokens.view(-1, 128) if plan.arranged else tokens


@lru_cache(maxsize=1024)
def _kernel(plan: Stream, out: torch.dtype, device: int) -> Any:
    return nvrtc.load_kernel(device_functions() + entry(plan, out), "mxfp4_stream", plan.shared_bytes(), device)


def multiply(
    tokens: Tensor, token_scale: Tensor | None, packed: Tensor, scale: Tensor, dtype: torch.dtype, plan: Stream
) -> Tensor:
    """tokens bfloat16 [M, K] by a packed weight [N, K/2]: [M, N] in dtype; K a multiple of 128, all at 16-byte starts.

    token_scale: as in hopper.decode.
    """
    count, rows, device = tokens.shape[0], packed.shape[0], tokens.get_device()
    y = torch.empty(count, rows, dtype=dtype, device=tokens.device)
    wide = matrix_of(hopper.arrange(tokens) if plan.arranged else tokens, plan)
    values = _Arguments(args=arguments(token_scale, scale, y))
    for field, t, box in zip(("codes", "wide"), (packed, wide), plan.boxes(), strict=True):
        pitch = t.stride(0) * t.element_size()
        encoded = nvrtc.tensor_map(t.data_ptr(), t.shape[0], t.shape[1], pitch, box[:2], t.dtype, box[2])
        ctypes.memmove(getattr(values, field), encoded, 128)
    grid = (plan.grid(rows, nvrtc.processors(device)),)
    function = _kernel(plan, dtype, device)
    nvrtc.launch(function, grid, plan.threads, plan.shared_bytes(), values, device, overlap=True)
    return y
