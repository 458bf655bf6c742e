"""Many tokens by a packed MXFP4 weight on Hopper: CUDA C++ (prefill.cuh, on kernels/mixed), compiled at first use.

    multiply       bfloat16 tokens
    multiply_e4m3  e4m3 tokens with a scale each, by the weight's e4m3 values that `expand` would write

All of K, or of a part of it as the plan says, is summed by the tensor cores in float32, in order; the parts are added
two by two, and the sum is rounded once. A token's bits depend on the plan's parts alone.
"""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import hopper as mixed
from quantrot.kernels.mxfp4.reference import E2M1, GROUP

ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap y, const __grid_constant__ quantrot::MixedArgs args) {{
  quantrot::{function}<quantrot::{tile}<{shape}>, quantrot::{operands}>(&codes, &wide, &y, args);
}}
"""
SHIFTS = tuple(range(-14, 7))  # of a group's power of two, relative to its row's


@dataclass(frozen=True)
class Plan(mixed.Plan):
    """The same tiles, of half the bytes of codes; not with four warpgroups that multiply."""

    tile: ClassVar[str] = "PackedTile"
    operands: ClassVar[str] = "SixteenOperands"

    def _stage(self) -> int:
        return self.rows * mixed.BLOCK // 2 + self.columns * 128 + 16

    def boxes(self, weight: bool = True) -> tuple[mixed.Box, ...]:
        _, *rest = super().boxes(weight)
        return (self.rows, mixed.BLOCK // 2, mixed.BLOCK // 2), *rest


@dataclass(frozen=True)
class Plan8(mixed.Plan):
    """The same tiles for tokens in e4m3, columns of K counted in pairs; without parts."""

    tile: ClassVar[str] = "Tile"
    operands: ClassVar[str] = "EightOperands"

    def shared_bytes(self) -> int:
        return super().shared_bytes() + 256  # a table


def entry(plan: Plan | Plan8, name: str = "mxfp4_prefill") -> str:
    """C++ of the kernel `name`."""
    flags = (str(flag).lower() for flag in (plan.odd, plan.halves))
    shape = plan.groups, plan.columns, plan.depth, plan.split, plan.share, *flags, max(plan.teams, 1)
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else "",
        threads=plan.threads,
        name=name,
        function="parts" if plan.teams else "prefill",
        tile=plan.tile,
        shape=", ".join(map(str, shape)),
        operands=plan.operands,
    )


def magnitudes() -> str:
    """C++: MAGNITUDES, the eight magnitudes as e4m3 bytes times 2^-14 (zeros, and what is less) to 2^6, then NaN's."""
    values = torch.tensor(E2M1)[None] * torch.exp2(torch.tensor(SHIFTS, dtype=torch.float32))[:, None]
    words = torch.cat([values.to(torch.float8_e4m3fn).view(torch.uint8), torch.full((1, 8), 0x7F, dtype=torch.uint8)])
    rows = ", ".join(f"{{{low:#x}u, {high:#x}u}}" for low, high in words.view(torch.uint32).tolist())
    constants = f"constexpr int LENGTH = {len(words)}, SHIFTS = {-SHIFTS[0]};"
    return f"namespace quantrot {{ {constants}\n__device__ const u32 MAGNITUDES[LENGTH][2] = {{{rows}}}; }}\n"


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return mixed.device_functions() + magnitudes() + (Path(__file__).parent / "prefill.cuh").read_text()


def fits(x: Tensor, rows: int) -> bool:
    """Whether `multiply` takes these tokens [M, K] and a weight of so many rows."""
    return x.dtype == torch.bfloat16 and x.numel() > 0 and x.shape[1] % mixed.BLOCK == 0 and rows > 0 and rows % 8 == 0


def fits_e4m3(depth: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether `multiply_e4m3` takes a weight of so many rows and columns, and gives results of this type."""
    return depth % (2 * mixed.BLOCK) == 0 and rows % 8 == 0 and dtype == torch.bfloat16


def pays(tokens: int, rows: int) -> bool:
    """Whether `multiply_e4m3` takes less than the weight's expansion and cuBLAS's product.

    By 4096 x 4096 and 4096 x 14336, and quantization: 512 tokens take 1.14 and 1.02 of that time, 1024 0.93 and 0.90,
    2048 1.00 and 0.99; by 8192 x 8192 and 28672 x 4096 1024 take 0.86 and 0.93.
    """
    return tokens <= 1024 and tokens * rows > 1 << 21


def _tiles(tokens: int, rows: int, widths: Iterable[int]) -> Iterator[mixed.Plan]:
    """Plans of persistent thread blocks."""
    share = 2 if rows > 128 else 1
    for width in widths:
        if not width > mixed.SOME >= tokens:  # a box of twice the tokens there are is slow
            yield mixed.Plan(width, share=share, odd=-(-rows // 128) % share > 0, halves=width > 64)


@lru_cache(maxsize=4096)
def plan_for(tokens: int, rows: int, depth: int) -> Plan:
    """The plan that takes least by kernels/mixed's model of the same loops, of codes of a byte.

    64 tokens by 4096 x 4096 took 17.9 us in boxes of 128, 128 tokens 11.7.
    """
    times = [(mixed.prefill_cycles(plan, rows, tokens, depth, 0), plan) for plan in _tiles(tokens, rows, mixed.WIDTHS)]
    for plan, block, _, rest in mixed.PARTS:
        taken = plan.teams * plan.groups < 4 and not plan.columns > mixed.SOME >= tokens
        if taken and plan.tiles(rows, tokens) <= mixed.PROCESSORS // plan.cluster and plan.splits(depth):
            times.append((depth / plan.parts / mixed.BLOCK * block + rest, plan))
    return Plan(**vars(min(times, key=lambda found: found[0])[1]))


@lru_cache(maxsize=4096)
def plan8_for(tokens: int, rows: int, depth: int) -> Plan8:
    """The same for e4m3, whose loop takes as long for 128 columns."""
    plans = _tiles(tokens, rows, (64, 128, 192, 256))
    return Plan8(**vars(min(plans, key=lambda plan: mixed.prefill_cycles(plan, rows, tokens, depth // 2, 0))))


def arguments(x: Tensor, scale: Tensor, y: Tensor, plan: Plan, settled: bool) -> mixed.MixedArgs:
    """The kernel's last parameter."""
    return mixed.MixedArgs(
        scale=scale.data_ptr(),
        rows=y.shape[1],
        columns=x.shape[0],
        depth=x.shape[1],
        groups=scale.shape[1],
        group_blocks=x.shape[1] // mixed.BLOCK,
        segment=plan.segment(x.shape[1]),
        tile_group=plan.tile_group,
        early=settled,
    )


def arguments8(
    x: Tensor, token_scale: Tensor, scale: Tensor, row_scale: Tensor, y: Tensor, plan: Plan8
) -> mixed.MixedArgs:
    """The kernel's last parameter; x [M, K / 2], pairs of e4m3."""
    return mixed.MixedArgs(
        scale=row_scale.data_ptr(),
        zero=scale.data_ptr(),
        token=token_scale.data_ptr(),
        rows=y.shape[1],
        columns=x.shape[0],
        depth=x.shape[1],
        groups=1,
        group_blocks=x.shape[1] // mixed.BLOCK,
        segment=plan.segment(x.shape[1]),
        tile_group=plan.tile_group,
    )


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "y")] + [("args", mixed.MixedArgs)]


@lru_cache(maxsize=256)
def _kernel(plan: Plan | Plan8, device: int) -> int:
    return nvrtc.load_kernel(device_functions() + entry(plan), "mxfp4_prefill", plan.shared_bytes(), device)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _launch(plan: Plan | Plan8, packed: Tensor, x: Tensor, y: Tensor, args: mixed.MixedArgs) -> None:
    values, device = _Arguments(args=args), x.get_device()
    for field, t, box in zip(("codes", "wide", "y"), (packed, x, y), plan.boxes(True), strict=True):
        pitch = t.stride(0) * t.element_size()
        encoded = nvrtc.tensor_map(t.data_ptr(), t.shape[0], t.shape[1], pitch, box[:2], t.dtype, box[2])
        ctypes.memmove(getattr(values, field), encoded, 128)
    grid, shared = (plan.grid(args.rows, args.columns, nvrtc.processors(device)),), plan.shared_bytes()
    nvrtc.launch(_kernel(plan, device), grid, plan.threads, shared, values, device, overlap=True)


def multiply(x: Tensor, packed: Tensor, scale: Tensor, plan: Plan | None = None, *, settled: bool = False) -> Tensor:
    """x bfloat16 [M, K] by a packed weight [N, K/2]: [M, N], for which `fits` holds.

    Products are exact for group scales from 2^-62 to 2^65. settled: no kernel that may still run when this one is
    launched writes the weight.
    """
    given = packed, scale
    x, packed, scale = _aligned(x), _aligned(packed), _aligned(scale)
    settled = settled and packed is given[0] and scale is given[1]
    assert scale.shape[1] * GROUP == x.shape[1]
    plan = plan or plan_for(len(x), len(packed), x.shape[1])
    y = torch.empty(len(x), len(packed), dtype=x.dtype, device=x.device)
    _launch(plan, packed, x, y, arguments(x, scale, y, plan, settled))
    return y


def multiply_e4m3(
    tokens: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    plan: Plan8 | None = None,
) -> Tensor:
    """tokens e4m3 [M, K] times token_scale float32 [M], by a packed weight: bfloat16 [M, N], where `fits_e4m3`.

    The weight's values are those of `expand_mxfp4`, whose row scales are given.
    """
    x = _aligned(tokens.view(torch.bfloat16))
    packed, scale = _aligned(packed), _aligned(scale)
    assert scale.shape[1] * GROUP == tokens.shape[1]
    plan = plan or plan8_for(len(x), len(packed), tokens.shape[1])
    y = torch.empty(len(x), len(packed), dtype=torch.bfloat16, device=x.device)
    _launch(plan, packed, x, y, arguments8(x, token_scale, scale, row_scale, y, plan))
    return y
