"""33 to 512 tokens in e4m3 by a packed MXFP4 weight on Hopper: CUDA C++ (batch.cuh, on kernels/mixed), made at first
use.

Order of sums: the tensor core's in float32 along a part of K, times the row's power of two and the token's scale; then
the parts', two by two. A token's bits depend on the plan's parts alone.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import hopper as mixed
from quantrot.kernels.mxfp4.reference import GROUP

WIDE = mixed.WIDE
BLOCK = 128  # columns of K that a stage holds, and the granule of K
TABLE = 4096  # bytes of shared memory: see batch.cuh
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap y, const __grid_constant__ quantrot::BatchArgs args) {{
  quantrot::parts<quantrot::Tile<{tile}>, quantrot::BatchOperands<quantrot::{out}>>(&codes, &wide, &y, args);
}}
"""


@dataclass(frozen=True)
class Plan(mixed.Plan):
    """mixed's plan with teams; a block of K is 128 columns: 64 bytes of codes, 128 of a token."""

    halves: bool = False

    def segment(self, depth: int) -> int:
        return super().segment(depth // 2)

    def splits(self, depth: int) -> bool:
        return super().splits(depth // 2)

    def beside(self, depth: int) -> int:
        """Bytes of shared memory for the table and the rows' scales."""
        return TABLE + 64 * self.groups * self.teams * (self.segment(depth) + 1) * 4

    def fitted(self, depth: int) -> "Plan":
        """The same with as many stages as fit."""
        room = mixed.MAX_SHARED - self._output() - self.beside(depth)
        return replace(self, stages=min(12, room // self._stage() // self.teams))

    def bytes_for(self, depth: int) -> int:
        return self.shared_bytes() + self.beside(depth)

    def entry(self, out: torch.dtype, name: str = "mxfp4_batch") -> str:
        """C++ of the kernel `name`."""
        tile = f"{self.groups}, {self.columns}, {self.depth}, {self.split}, 1, false, false, {self.teams}"
        cluster = f"__cluster_dims__({self.split}, 1, 1) " if self.split > 1 else ""
        return ENTRY.format(cluster=cluster, threads=self.threads, name=name, tile=tile, out=WIDE[out])


MOST = 512  # tokens
WIDTHS = (64, 96, 128, 192, 256)


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return mixed.device_functions() + (Path(__file__).parent / "batch.cuh").read_text()


def fits(x: Tensor, rows: int) -> bool:
    """Whether `multiply` takes tokens [M, K] like these and a weight of so many rows."""
    tokens, depth = x.shape
    return x.dtype in WIDE and 0 < tokens <= MOST and depth > 0 and depth % BLOCK == 0 and rows > 0 and rows % 8 == 0


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, depth: int) -> Plan:
    """Tiles of 64 rows, of as many tokens as there are, up to 256; K in two where tiles are few."""
    across = -(-tokens // WIDTHS[-1])
    width = next(w for w in WIDTHS if w * across >= tokens)
    tiles = -(-rows // 64) * across
    split = 2 if tiles <= mixed.PROCESSORS // 2 and width != 96 else 1
    tries = (Plan(width, 2, split, groups=1), Plan(width, 2, 2, groups=1), Plan(64, 1, 1, groups=1))
    fitted = (plan.fitted(depth) for plan in tries)
    return next(plan for plan in fitted if plan.stages >= 2 and plan.splits(depth))


def padded(tokens: int, plan: Plan) -> int:
    """Rows of the tokens' memory: whole tiles. (A row outside of a matrix costs the copy engine some four cycles.)"""
    return -(-tokens // plan.columns) * plan.columns


def room(tokens: int, depth: int, plan: Plan, device: torch.device) -> Tensor:
    """Where `multiply` wants tokens."""
    return torch.empty(padded(tokens, plan), depth, dtype=torch.float8_e4m3fn, device=device)


def arrange(tokens: Tensor, to: Tensor) -> Tensor:
    """e4m3 [M, K] in the order of batch.cuh, to a `room`."""
    count, depth = tokens.shape
    units = tokens.view(torch.int32).view(count, depth // BLOCK, 4, 8)
    to[:count].view(torch.int32).view(count, depth // BLOCK, 8, 4).copy_(units.transpose(2, 3))
    return to


class BatchArgs(mixed.MixedArgs):
    _fields_ = [(name, ctypes.c_void_p) for name in ("packed", "token_scale", "outside")]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "y")] + [("args", BatchArgs)]


def flags(rows: int, plan: Plan, device: torch.device) -> Tensor:
    """What `multiply` tells of rows."""
    return torch.empty(plan.parts, -(-rows // plan.rows) * plan.rows // 16, dtype=torch.int32, device=device)


def arguments(
    token_scale: Tensor, packed: Tensor, scale: Tensor, y: Tensor, outside: Tensor, plan: Plan, settled: bool
) -> BatchArgs:
    """The kernel's last parameter."""
    columns, rows = y.shape
    return BatchArgs(
        scale=scale.data_ptr(),
        rows=rows,
        columns=columns,
        depth=scale.shape[1] * GROUP,
        groups=scale.shape[1],
        group_blocks=1,
        segment=plan.segment(scale.shape[1] * GROUP),
        early=settled,
        packed=packed.data_ptr(),
        token_scale=token_scale.data_ptr(),
        outside=outside.data_ptr(),
    )


def matrices(packed: Tensor, tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the copy engine moves: of tokens, two as one element of 16 bits."""
    return packed, tokens.view(torch.bfloat16), y


@lru_cache(maxsize=256)
def _kernel(plan: Plan, out: torch.dtype, shared: int, device: int) -> int:
    return nvrtc.load_kernel(device_functions() + plan.entry(out), "mxfp4_batch", shared, device)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def multiply(
    tokens: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    count: int,
    dtype: torch.dtype,
    plan: Plan,
    *,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`count` arranged tokens, a `room`, times float32 [count], by a packed weight [N, K/2]: [count, N], outside.

    outside: int32 [parts, .], a bit for each row of the weight, 16 a number: whether it has a group below the window of
    its part of K, which counted as zeros. settled: no kernel that may still run when this one is launched writes the
    weight.
    """
    given = packed, scale
    packed, scale = _aligned(packed), _aligned(scale)
    settled = settled and packed is given[0] and scale is given[1]
    rows, device, depth = packed.shape[0], packed.get_device(), tokens.shape[1]
    y = torch.empty(count, rows, dtype=dtype, device=packed.device)
    outside = flags(rows, plan, packed.device)
    values = _Arguments(args=arguments(token_scale, packed, scale, y, outside, plan, settled))
    for field, t, box in zip(("codes", "wide", "y"), matrices(packed, tokens, y), plan.boxes(True), strict=True):
        pitch = t.stride(0) * t.element_size()
        encoded = nvrtc.tensor_map(t.data_ptr(), t.shape[0], t.shape[1], pitch, box[:2], t.dtype, box[2])
        ctypes.memmove(getattr(values, field), encoded, 128)
    grid, shared = (plan.grid(rows, count, nvrtc.processors(device)),), plan.bytes_for(depth)
    nvrtc.launch(_kernel(plan, dtype, shared, device), grid, plan.threads, shared, values, device, overlap=True)
    return y, outside
