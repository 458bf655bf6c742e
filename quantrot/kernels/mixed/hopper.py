"""The mixed product for Hopper: CUDA C++ (multiply.cuh, gemm.cuh, parts.cuh, norm.cuh and decode.cuh, on
kernels/hopper.cuh), compiled at first use.

    multiply     y = narrow operand [R, K] by the wide one [C, K]: [C, R] where the weight is narrow, [R, C] otherwise
    unsupported  why these operands are not for it, or None

Order of operations: with one scale a row, all of K is summed by the tensor cores in float32, the sum is multiplied by
the scale, the bias is added, the result is rounded once. With groups, many tokens: before a group is added the float32
sum is multiplied by (scale of the group before it / its scale), after the last one by its scale; a group whose scale is
0, or under 2^-64 of the one before it, adds nothing. With few tiles, K is in as many parts as the plan says, each such
a chain, added two by two. Few tokens (decode.cuh): the sum of 64 or 128 columns times its scale is added (fused) to a
float32 sum; columns of K in 128s are dealt to as many teams as the plan says, in each part of K, each such a chain in
the order of K, added in order. Plans for the same number of parts and teams give the same bits, whatever their tiles.
"""

import ctypes
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import conversions
from quantrot.kernels.mixed.hopper_plans import BLOCK, FEW, NUMBERS, Decode, Kernel, Plan, plan_for, token_plan
from quantrot.kernels.mixed.norm import WIDE
from quantrot.kernels.mixed.norm import prepare as prepare_norm
from quantrot.kernels.mixed.norm import supports as supports_norm
from quantrot.kernels.nvrtc import load_kernel, processors
from quantrot.kernels.ready import Run, address

ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap codes, const __grid_constant__ quantrot::TensorMap wide,
    const __grid_constant__ quantrot::TensorMap y, const __grid_constant__ quantrot::MixedArgs args) {{
  quantrot::{call};
}}
"""


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    ours = nvrtc.sources("mixed/multiply", "mixed/gemm", "mixed/norm", "mixed/decode", "mixed/parts")
    return nvrtc.sources("hopper", "products") + conversions.device_functions() + ours


def entry(plan: Plan | Decode, kernel: Kernel, name: str = "mixed") -> str:
    """C++ of the kernel `name`."""
    return ENTRY.format(
        cluster=f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else "",
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        call=plan.call(kernel),
    )


# --- What can be run -------------------------------------------------------------------------------------------------


def unsupported(codes: Tensor, wide: Tensor, scale: Tensor, weight: bool) -> str | None:
    """Why `multiply` does not take these operands (codes as bytes), whatever the device, or None."""
    (columns, depth), rows = wide.shape, scale.shape[0]
    if wide.dtype not in WIDE:
        return f"the wide operand is {wide.dtype}; allowed: {', '.join(map(str, WIDE))}"
    if depth % 16 or (rows if weight else columns) % 8:
        return f"K is {depth}, N is {rows if weight else columns}; K must be a multiple of 16, N of 8"
    if scale.shape[1] > 1 and depth // scale.shape[1] % BLOCK:
        return f"groups of {depth // scale.shape[1]} columns; allowed: multiples of {BLOCK}"
    if max(rows, columns, depth) >= 1 << 30:
        return "a size of 2^30 or more"
    return None


def takes_around(rows: int, depth: int, groups: int) -> bool:
    """Whether up to FEW tokens by a weight of this size have a gate or residual in their kernel."""
    return depth % 16 == 0 and rows % 16 == 0 and (groups == 1 or depth // groups % BLOCK == 0)


def takes(x: Tensor, rows: int, groups: int, norm: Tensor | None, residual: Tensor | None) -> bool:
    """Whether `multiply` takes this norm and residual with an x that it takes."""
    if x.shape[0] > FEW or (residual is not None and (residual.data_ptr() % 16 or not residual.is_contiguous())):
        return False
    if norm is None:
        return True
    one = x.shape[0] == 1
    fits = not one or token_plan(rows, x.shape[1], _group(x.shape[1], groups), True, False, False) is not None
    return fits and supports_norm(x, norm)


# --- Launch ----------------------------------------------------------------------------------------------------------


class MixedArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scale", "zero", "bias", "y")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "depth", "groups", "group_blocks", "segment")),
        *((name, ctypes.c_int) for name in ("tile_group", "early")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("token", "norm", "residual", "parts")),
        *((name, ctypes.c_int) for name in ("counter", "box")),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in ("codes", "wide", "y")] + [("args", MixedArgs)]


def _group(depth: int, groups: int) -> int:
    """Kernel's group."""
    return 0 if groups == 1 else 1 if depth // groups // BLOCK % 2 else 2


def kernel_of(wide: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, kind: str, weight: bool) -> Kernel:
    """Which kernel these operands want."""
    group = _group(wide.shape[1], scale.shape[1])
    return Kernel(kind, wide.dtype, weight, group, zero is not None, scale.dtype, None if bias is None else bias.dtype)


def arguments(
    y: Tensor,
    wide: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    plan: Plan | Decode,
    early: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    parts: Tensor | None = None,
) -> MixedArgs:
    """The kernel's last parameter."""
    (columns, depth), (rows, groups) = wide.shape, scale.shape
    zero_at, bias_at, norm_at, residual_at = (None if t is None else t.data_ptr() for t in (zero, bias, norm, residual))
    return MixedArgs(
        scale.data_ptr(),
        zero_at,
        bias_at,
        y.data_ptr(),
        rows,
        columns,
        depth,
        groups,
        -(-(depth // groups) // BLOCK),
        plan.segment(depth),
        getattr(plan, "tile_group", 1),
        early,
        epsilon,
        wide.data_ptr(),
        norm_at,
        residual_at,
        None if parts is None else parts.data_ptr(),
        0 if parts is None else nvrtc.counters_in_turn(len(parts)),
        plan.box(columns),
    )


def scratch(plan: Plan | Decode, rows: int, columns: int, device: torch.device) -> Tensor | None:
    """Room for what every warpgroup of two clusters that halve K through memory leaves of its tile."""
    if isinstance(plan, Decode) or plan.apart == 1:
        return None
    warpgroups = plan.tiles(rows, columns) * plan.split * plan.teams * plan.groups
    return torch.empty(warpgroups, 2 * 64 * plan.own[0], dtype=torch.float32, device=device)


@lru_cache(maxsize=1024)
def _kernel(plan: Plan | Decode, kernel: Kernel, device: int) -> Any:
    """The function, ready to launch on this device."""
    return load_kernel(device_functions() + entry(plan, kernel), "mixed", plan.shared_bytes(), device)


def _aligned(x: Tensor, columns: int) -> Tensor:
    """x's first columns, contiguous, with rows that start at multiples of 16 bytes."""
    size, x = x.element_size(), x if x.shape[1] == columns else x[:, :columns]
    fits = x.stride(1) == 1 and x.stride(0) * size % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _numbers(t: Tensor) -> Tensor:
    return (t if t.dtype in NUMBERS else t.float()).contiguous()


def multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    narrow_weight: bool,
    plan: Plan | Decode | None = None,
    *,
    ready: bool = False,
    gated: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """mixed_gemm for 16-bit wide operands, x [M, K], weight [N, K] (codes as bytes), by the plan or the rule's.

    ready: mixed_gemm's weight_ready. A copy that is made here, for its alignment, is not. gated (gates), norm, epsilon
    and residual: mixed_linear's, for up to FEW tokens, the last three where `takes` says so.
    Raises ValueError for what `unsupported` names.
    """
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    assert codes.dtype == torch.uint8, "codes as bytes: the copy engine's map is of bytes"
    reason = unsupported(codes, wide, scale, narrow_weight)
    if reason:
        raise ValueError(f"backend: 'hopper': {reason}; use 'auto' for others")
    if not x.shape[0] * weight.shape[0]:
        return torch.empty(x.shape[0], weight.shape[0] >> gated, dtype=wide.dtype, device=x.device)
    rest = plan, ready, gated, norm, epsilon, residual
    run = prepare(x, weight, scale, zero, bias, kind, narrow_weight, *rest)
    return run(x, weight, scale, zero, bias, norm, residual)


def prepare(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    narrow_weight: bool,
    plan: Plan | Decode | None = None,
    ready: bool = False,
    gated: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
) -> Run:
    """`multiply` of operands that it takes, as a function of x, weight, scale, zero, bias, norm and residual like
    these."""
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    (columns, depth), rows, device = wide.shape, codes.shape[0], x.get_device()
    given = codes, scale, bias
    codes, wide, scale = _aligned(codes, depth), _aligned(wide, depth), _numbers(scale)
    bias = None if bias is None else _numbers(bias)
    early = ready and narrow_weight and [*map(address, given)] == [*map(address, (codes, scale, bias))]
    kernel = kernel_of(wide, scale, zero, bias, kind, narrow_weight)
    first = None
    if norm is not None and columns > 1:
        first, norm = prepare_norm(wide, norm, epsilon, ready), None
        wide = torch.empty(wide.shape, dtype=wide.dtype, device="meta")  # as it gives them, contiguous
    if norm is not None:
        plan = plan or token_plan(rows, depth, kernel.group, True, gated, residual is not None)
    chosen = plan or plan_for(rows, columns, depth, kernel.group, narrow_weight)
    if gated or residual is not None:
        assert isinstance(chosen, Decode)
        chosen = replace(chosen, gated=gated, add=residual is not None)
    made: Any = {"size": (x.shape[0], weight.shape[0] >> gated), "dtype": wide.dtype, "device": x.device}
    y = torch.empty(made["size"], device="meta")
    values = _Arguments(args=arguments(y, wide, scale, zero, bias, chosen, early, norm, epsilon, residual))
    matrices = codes, wide, torch.empty(made["size"], dtype=wide.dtype, device="meta")
    boxes = zip(matrices, chosen.boxes(columns, narrow_weight), strict=True)
    map_codes, map_wide, map_y = (nvrtc.map_of(t, box) for t, box in boxes)
    grid = (chosen.grid(rows, columns, processors(device)),)
    function, shared = _kernel(chosen, kernel, device), chosen.shared_bytes()
    launch = nvrtc.Launch(function, grid, chosen.threads, shared, device, overlap=True)

    def run(x: Tensor, weight: Tensor, scale: Tensor, zero: Any, bias: Any, norm: Any, residual: Any) -> Tensor:
        wide, codes = (x, weight) if narrow_weight else (weight, x)
        codes, wide, y = _aligned(codes, depth), _aligned(wide, depth), torch.empty(**made)
        if first:
            wide, norm = first(wide, norm), None
        scale, bias = _numbers(scale), None if bias is None else _numbers(bias)
        now = _Arguments.from_buffer_copy(values)
        args = now.args
        args.scale, args.zero, args.bias, args.y = scale.data_ptr(), address(zero), address(bias), y.data_ptr()
        args.token, args.norm, args.residual = wide.data_ptr(), address(norm), address(residual)
        if (parts := scratch(chosen, rows, columns, y.device)) is not None:
            args.parts, args.counter = parts.data_ptr(), nvrtc.counters_in_turn(len(parts))
        ctypes.memmove(now.codes, map_codes(codes), 128)
        ctypes.memmove(now.wide, map_wide(wide), 128)
        if isinstance(chosen, Plan):
            ctypes.memmove(now.y, map_y(y), 128)
        launch(now)
        return y

    return run
