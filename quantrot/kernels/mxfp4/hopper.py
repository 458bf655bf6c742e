"""Few tokens by a packed MXFP4 weight on Hopper: CUDA C++ (decode.cuh), compiled at first use.

Order of sums: the tensor core's in float32 along the columns that a team takes, 256 at a time in turn; then the teams'
and the cluster's blocks' in their order. A token's bits do not depend on its neighbours, as long as the plan is the
same.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import tuned

OUT = {torch.bfloat16: "OutBf16", torch.float16: "OutFp16", torch.float32: "OutFp32"}
STEP = 128  # columns that are arranged together, and the granule of K
CHUNK = 256  # columns of K in a stage
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::DecodeArgs args) {{
  quantrot::decode<quantrot::Plan<{shape}>, quantrot::{out}>(&codes, &wide, args);
}}
"""
ARRANGE = """extern "C" __global__ void __launch_bounds__(256) {name}(
    const void* x, void* y, int tokens, int columns) {{
  quantrot::arrange<{tiles}>(x, y, tokens, columns);
}}
"""
Box = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
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
SPLIT_COLUMNS = 4096  # fewest that a cluster shares by rule
ROOM = 104 << 10, 220 << 10  # bytes of shared memory for the ring: the first where each team has two stages


def tiles_of(tokens: int) -> int:
    """Tiles of eight tokens that the kernel is made for; 0 for one token."""
    return 0 if tokens == 1 else 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def fits(columns: int) -> bool:
    """Whether the kernel takes weights of so many columns."""
    return columns > 0 and columns % STEP == 0


def plan_of(tiles: int, rows: int, columns: int, units: int, split: int = 1) -> Plan:
    """The plan for tiles of 16 * units rows: 8 to 16 warps, and two stages a team where they fit."""
    once = split > 1 or -(-rows // (16 * units)) <= PROCESSORS
    tall = 2 if units % 2 == 0 and (tiles < 4 or units <= 4) else 1
    row_warps = units // tall
    teams = min(4 if tiles > 1 and units > 2 else 8, 1 << (16 // row_warps).bit_length() - 1)
    arranged = split == 1 and (tiles == 4 or (tiles == 2 and not once))
    most = -(-columns // (CHUNK * split * teams))  # stages of a team that there are to do
    for room in ROOM:
        for deep in range(most, 0, -1):
            plan = Plan(tiles, tall, row_warps, teams, teams * deep, split, once, 1, arranged)
            if plan.shared_bytes() <= room:
                break
        if deep > 1:
            break
    return plan


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, columns: int) -> Plan:
    """The measured plan (kept for 1, 8, 16 and 32 tokens; others take the next of these), else one by rule.

    The rule: tiles as tall as one for each multiprocessor makes them, up to 128 rows, past that 32 or, for more than
    16 tokens, 112. More than 16 tokens are halved by two blocks of a cluster where tiles are few, but not along
    fewer than 4096 columns: 2048 x 2048 takes as long as 2048 x 8192 then, 9.3 us where bfloat16 takes 5.6.
    """
    tiles = tiles_of(tokens)
    measured = tuned.HOPPER_DECODE.get((8 * tiles or 1, rows, columns))
    if measured:
        return Plan(tiles, *measured)
    split = 2 if tiles == 4 and rows <= 32 * PROCESSORS and columns >= SPLIT_COLUMNS else 1
    units = -(-rows * split // (16 * PROCESSORS))
    if units > 8:
        units = 7 if tiles == 4 else 2
    return plan_of(tiles, rows, columns, units, split)


class DecodeArgs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("scale", "token_scale", "y")] + [
        (name, ctypes.c_int) for name in ("tokens", "rows", "columns")
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide")] + [("args", DecodeArgs)]


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    here = Path(__file__).parent
    return (here.parent / "hopper.cuh").read_text() + (here / "decode.cuh").read_text()


def entry(plan: Plan, out: torch.dtype, name: str = "mxfp4_decode") -> str:
    """C++ of the kernel `name`."""
    flags = [str(flag).lower() for flag in (plan.arranged, plan.once)]
    shape = (plan.tiles, flags[0], plan.tall, plan.row_warps, plan.teams, plan.stages, plan.split, flags[1])
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.split}, 1, 1) " if plan.split > 1 else "",
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        shape=", ".join(map(str, shape)),
        out=OUT[out],
    )


def arguments(token_scale: Tensor | None, scale: Tensor, y: Tensor) -> DecodeArgs:
    """The kernel's last parameter; y [tokens, rows]."""
    pointers = (None if t is None else t.data_ptr() for t in (scale, token_scale, y))
    return DecodeArgs(*pointers, *y.shape, scale.shape[1] * 32)


def matrix_of(tokens: Tensor, plan: Plan) -> Tensor:
    """Tokens as the copy engine takes them: one as rows of 64, those that `arrange` laid down as rows of 128."""
    return tokens.view(-1, 64) if plan.tiles == 0 else tokens.view(-1, 128) if plan.arranged else tokens


@lru_cache(maxsize=1024)
def _kernel(plan: Plan, out: torch.dtype, device: int) -> int:
    return nvrtc.load_kernel(device_functions() + entry(plan, out), "mxfp4_decode", plan.shared_bytes(), device)


@lru_cache(maxsize=64)
def _arrange_kernel(tiles: int, device: int) -> int:
    source = device_functions() + ARRANGE.format(name="mxfp4_arrange", tiles=tiles)
    return nvrtc.load_kernel(source, "mxfp4_arrange", 0, device)


class ArrangeArguments(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("tokens", ctypes.c_int), ("columns", ctypes.c_int)]


def arrange(tokens: Tensor, tiles: int) -> Tensor:
    """At most 8 * tiles tokens in the order in which the lanes of `decode` multiply them."""
    count, columns, device = *tokens.shape, tokens.get_device()
    words = -(-columns // STEP) * tiles * 128  # of 16 bytes
    x = torch.empty(words * 8, dtype=torch.bfloat16, device=tokens.device)
    parameters = ArrangeArguments(tokens.data_ptr(), x.data_ptr(), count, columns)
    nvrtc.launch(_arrange_kernel(tiles, device), (-(-words // 256),), 256, 0, parameters, device, overlap=True)
    return x


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def decode(
    tokens: Tensor,
    token_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    plan: Plan | None = None,
) -> Tensor:
    """tokens bfloat16 [M, K] by a packed weight [N, K/2]: [M, N] in dtype; M from 1 to 32, K a multiple of 128.

    token_scale: float32 [M], multiplies each token's result, or None. Products are exact for group scales from 2^-62
    to 2^65.
    """
    tokens, packed, scale = _aligned(tokens), _aligned(packed), _aligned(scale)
    count, rows, device = tokens.shape[0], packed.shape[0], tokens.get_device()
    plan = plan or plan_for(count, rows, tokens.shape[1])
    y = torch.empty(count, rows, dtype=dtype, device=tokens.device)
    wide = matrix_of(arrange(tokens, plan.tiles) if plan.arranged else tokens, plan)
    values = _Arguments(args=arguments(token_scale, scale, y))
    for field, t, box in zip(("codes", "wide"), (packed, wide), plan.boxes(), strict=True):
        pitch = t.stride(0) * t.element_size()
        encoded = nvrtc.tensor_map(t.data_ptr(), t.shape[0], t.shape[1], pitch, box[:2], t.dtype, box[2])
        ctypes.memmove(getattr(values, field), encoded, 128)
    grid = (plan.grid(rows, nvrtc.processors(device)),)
    function = _kernel(plan, dtype, device)
    nvrtc.launch(function, grid, plan.threads, plan.shared_bytes(), values, device, overlap=True)
    return y
