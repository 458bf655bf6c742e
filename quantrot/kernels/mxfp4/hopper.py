"""Few tokens by a packed MXFP4 weight on Hopper: CUDA C++ (decode.cuh), compiled at first use.

Sums of the tensor cores along a warp's steps of 128 columns, then the warps' and the slices' in their order: a result
does not depend on what runs first, and a token's bits not on its neighbours', as long as the plan is the same.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import tuned

OUT = {torch.bfloat16: "OutBf16", torch.float16: "OutFp16", torch.float32: "OutFp32"}
STEP = 128  # columns
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {resident}) {name}(
    const void* x, const unsigned char* packed, const unsigned char* scale, const float* token_scale, void* y,
    int tokens, int rows, int columns, int slice_steps, int ahead) {{
  quantrot::decode<{tall}, {tiles}, {row_warps}, {slice_warps}, {depth}, {arranged}, quantrot::{out}>(
      {{x, packed, scale, token_scale, y, tokens, rows, columns, slice_steps, ahead}});
}}
"""
ARRANGE = """extern "C" __global__ void __launch_bounds__(256) {name}(
    const void* x, void* y, int tokens, int columns) {{
  quantrot::arrange<{tiles}>(x, y, tokens, columns);
}}
"""


@dataclass(frozen=True)
class Plan:
    """Warps of a thread block, along the weight's rows and along K; steps on their way; slices of K; thread blocks that
    the compiler leaves room for on a multiprocessor; whether a kernel before lays the tokens down in the order of the
    products; rows of a warp, in units of 16; bytes of each row brought to the L2 cache while the kernel before ends."""

    row_warps: int
    slice_warps: int
    depth: int
    slices: int
    resident: int
    arranged: bool = False
    tall: int = 1
    ahead: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.slice_warps

    @property
    def rows(self) -> int:
        return 16 * self.tall * self.row_warps

    def shared_bytes(self, tiles: int) -> int:
        return self.slice_warps * self.rows * tiles * 8 * 4

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        steps = -(-columns // STEP)
        return -(-rows // self.rows), -(-steps // self.slice_steps(columns))

    def slice_steps(self, columns: int) -> int:
        steps = -(-columns // STEP)
        return max(1, -(-steps // self.slices))


def tiles_of(tokens: int) -> int:
    """Tiles of eight tokens that the kernel is made for."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def plan_for(tokens: int, rows: int, columns: int) -> Plan:
    """The measured plan (kept for 1, 8, 16 and 32 tokens; others take the next of these), else one by rule.

    The rule: up to eight tokens are read by all warps of a block from different columns, so that small weights fill the
    device without slices; more tokens are shared by warps on different rows, which read them through the same L1.
    """
    measured = tuned.HOPPER_DECODE.get((next(n for n in (1, 8, 16, 32) if tokens <= n), rows, columns))
    if measured:
        return Plan(*measured)
    row_warps = 1 if tokens <= 8 else 2
    blocks, steps = -(-rows // (16 * row_warps)), -(-columns // STEP)
    slices = max(1, min(4, 132 // blocks, steps // 16))
    return Plan(row_warps, 8 // row_warps, 2, slices, 1, tokens > 1)


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    here = Path(__file__).parent
    return (here.parent / "hopper.cuh").read_text() + (here / "decode.cuh").read_text()


def entry(plan: Plan, tiles: int, out: torch.dtype, name: str = "mxfp4_decode") -> str:
    """C++ of the kernel `name`."""
    return ENTRY.format(
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        tall=plan.tall,
        tiles=tiles,
        row_warps=plan.row_warps,
        slice_warps=plan.slice_warps,
        depth=plan.depth,
        arranged=str(plan.arranged).lower(),
        out=OUT[out],
    )


class ArrangeArguments(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("tokens", ctypes.c_int), ("columns", ctypes.c_int)]


class Arguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("token_scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("slice_steps", ctypes.c_int),
        ("ahead", ctypes.c_int),
    ]


def arranged_words(tokens: int, columns: int) -> int:
    """Words of 16 bytes of the arranged tokens."""
    return -(-columns // STEP) * tiles_of(tokens) * 128


def arguments(
    tokens: Tensor,
    token_scale: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    y: Tensor,
    plan: Plan,
    x: Tensor | None = None,
) -> Any:
    """The kernel's parameters; x: the arranged tokens; y is [tokens, rows], or float32 [slices, tokens, rows]."""
    columns = tokens.shape[1]
    return Arguments(
        (tokens if x is None else x).data_ptr(),
        packed.data_ptr(),
        scale.data_ptr(),
        None if token_scale is None else token_scale.data_ptr(),
        y.data_ptr(),
        tokens.shape[0],
        packed.shape[0],
        columns,
        plan.slice_steps(columns),
        plan.ahead,
    )


@lru_cache(maxsize=1024)
def _kernel(plan: Plan, tiles: int, out: torch.dtype, device: int) -> Any:
    source = device_functions() + entry(plan, tiles, out)
    return nvrtc.load_kernel(source, "mxfp4_decode", plan.shared_bytes(tiles), device)


@lru_cache(maxsize=64)
def _arrange_kernel(tiles: int, device: int) -> Any:
    return nvrtc.load_kernel(
        device_functions() + ARRANGE.format(name="mxfp4_arrange", tiles=tiles), "mxfp4_arrange", 0, device
    )


def arrange(tokens: Tensor) -> Tensor:
    """The tokens in the order in which the lanes of `decode` multiply them."""
    count, columns, device = *tokens.shape, tokens.get_device()
    words = arranged_words(count, columns)
    x = torch.empty(words * 8, dtype=torch.bfloat16, device=tokens.device)
    function = _arrange_kernel(tiles_of(count), device)
    parameters = ArrangeArguments(tokens.data_ptr(), x.data_ptr(), count, columns)
    nvrtc.launch(function, (-(-words // 256),), 256, 0, parameters, device, overlap=True)
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
    """tokens bfloat16 [M, K] by a packed weight [N, K/2]: [M, N] in dtype; M from 1 to 32, K a multiple of 32.

    token_scale: float32 [M], multiplies each token's result, or None. Products are exact for group scales from 2^-62
    to 2^65.
    """
    tokens, packed, scale = _aligned(tokens), _aligned(packed), scale.contiguous()
    count, rows = tokens.shape[0], packed.shape[0]
    plan = plan or plan_for(count, rows, tokens.shape[1])
    y = torch.empty(count, rows, dtype=dtype, device=tokens.device)
    tiles, grid = tiles_of(count), plan.grid(rows, tokens.shape[1])
    sliced = grid[1] > 1
    into = torch.empty(grid[1], count, rows, dtype=torch.float32, device=y.device) if sliced else y
    device = tokens.get_device()
    function = _kernel(plan, tiles, torch.float32 if sliced else dtype, device)
    x = arrange(tokens) if plan.arranged else None
    parameters = arguments(tokens, token_scale, packed, scale, into, plan, x)
    nvrtc.launch(function, grid, plan.threads, plan.shared_bytes(tiles), parameters, device, overlap=True)
    if sliced:
        from quantrot.kernels.mxfp4.triton_gemm import add_slices

        add_slices(into, token_scale, y)
    return y
