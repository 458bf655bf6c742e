"""INT4 in groups along the last dimension, asymmetric: the KV cache's narrowest format.

    quantize_int4    x [..., D] float -> codes uint8 [..., D/2], scale bfloat16 [..., D/group], low bfloat16 (as scale)
    dequantize_int4  codes, scale, low -> [..., D] float
    try_store_int4   both of a prompt's keys and values, the codes straight to a cache's room, in one kernel

x ~= code * scale + low, codes 0 to 15: low is the group's minimum and scale its range times 1/15, both rounded to
bfloat16 before they divide; rounding is to nearest, ties to even, in float32. Byte j holds column 2j in its low nibble
and column 2j + 1 in its high one. A constant group is low itself where that is a bfloat16 number; a zero low is +0.
A group that holds a NaN or an infinity dequantizes to NaN. Keys and values are one-sided in many channels, so a
symmetric code wastes a bit on some groups (docs/attention.md has what it costs). QuaRot (arXiv:2404.00456) quantizes
its KV cache so.

On a GPU each is one Triton kernel of the same bits, where plain torch launches some 25: without torch.compile a cache's
layer would be mostly those. It stays plain where torch.compile fuses it with what is around it, and where there is a
gradient.
"""

import torch
from torch import Tensor

from quantrot.kernels.operators import check_device, eager_inference, implement, uses_triton
from quantrot.kernels.ready import Ready, like, unseen

READY = Ready()
LEVELS = 15
LARGEST_GROUP = 1024  # of the kernels
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

torch.library.define("quantrot::quantize_int4", "(Tensor x, int group) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "quantrot::dequantize_int4", "(Tensor codes, Tensor scale, Tensor low, ScalarType dtype) -> Tensor"
)


def group_for(width: int, group: int) -> int:
    """The group along a side: `group` where it divides the width, else the whole width."""
    return group if width % group == 0 else width


def quantize_int4(x: Tensor, group: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize [..., D], D even and a multiple of `group`, any float dtype, any strides. ValueError if D does not."""
    key = None
    if x.is_cuda and unseen(x):
        key = like(x), group
        if (again := READY.find(key)) is not None:
            return again(x)
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x: {x.dtype} {list(x.shape)}; a float tensor with a last dimension is needed")
    width = x.shape[-1]
    if width % 2 or group < 1 or width % group:
        raise ValueError(f"x has {width} columns and groups of {group}; an even width and a divisor of it are needed")
    if x.is_cuda and eager_inference(x):
        if key and _kernel_takes(x, x.numel() // group, group, x.dtype):
            from quantrot.kernels import int4_triton

            return READY.keep(key, int4_triton.prepare_quantize(x, group), x.get_device())(x)
        return torch.ops.quantrot.quantize_int4(x, group)
    return _plain_quantize(x, group)


def _plain_quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    values = x.to(torch.float32).unflatten(-1, (-1, group))
    low, high = _rounded(values.amin(-1)) + 0.0, values.amax(-1)  # amin takes either zero, by the order of its steps
    scale = _rounded((high - low) * (1 / LEVELS))  # what a GPU's torch makes of a division by a number
    scale = torch.where(scale == 0, 1.0, scale)
    steps = (values - low.unsqueeze(-1)) / scale.unsqueeze(-1)
    finite = torch.isfinite(scale) & torch.isfinite(low)
    code = torch.where(finite.unsqueeze(-1), steps, 0.0).round_().clamp_(0, LEVELS).to(torch.uint8).flatten(-2)
    pairs = code.unflatten(-1, (-1, 2))
    scale = torch.where(finite, scale, torch.nan).to(torch.bfloat16)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale, low.to(torch.bfloat16)


def _rounded(x: Tensor) -> Tensor:
    """float32, rounded to what bfloat16 holds, ties to even, by its bits: torch.compile leaves out a cast to bfloat16
    and back, and codes would be others than those without it."""
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def dequantize_int4(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., D] in `dtype`: the float32 product and sum, rounded once. ValueError for what does not belong together."""
    key, operands = None, (codes, scale, low)
    if codes.is_cuda and unseen(*operands):
        key = *map(like, operands), dtype
        if (again := READY.find(key)) is not None:
            return again(*operands)
    fits = codes.dtype == torch.uint8 and codes.dim() == scale.dim() > 0 and codes.shape[:-1] == scale.shape[:-1]
    groups = scale.shape[-1] if fits else 0
    if not groups or 2 * codes.shape[-1] % groups or low.shape != scale.shape or not scale.is_floating_point():
        raise ValueError(
            f"codes: {codes.dtype} {list(codes.shape)}, scale: {scale.dtype} {list(scale.shape)}, low: "
            f"{list(low.shape)}; allowed: torch.uint8 [..., D/2], and floating-point numbers [..., D/group] for both"
        )
    check_device(codes=codes, scale=scale, low=low)
    if codes.is_cuda and eager_inference(*operands):
        if key and _kernel_takes(codes, scale.numel(), _group_of(codes, scale), scale.dtype, low.dtype, dtype):
            from quantrot.kernels import int4_triton

            return READY.keep(key, int4_triton.prepare_dequantize(*operands, dtype), codes.get_device())(*operands)
        return torch.ops.quantrot.dequantize_int4(codes, scale, low, dtype)
    return _plain_dequantize(codes, scale, low, dtype)


def _plain_dequantize(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    code = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).unflatten(-1, (scale.shape[-1], -1))
    x = code.to(torch.float32) * scale.to(torch.float32).unsqueeze(-1) + low.to(torch.float32).unsqueeze(-1)
    return x.flatten(-2).to(dtype)


def try_store_int4(k: Tensor, v: Tensor, cache: tuple[Tensor, ...], at: int) -> tuple[Tensor, Tensor] | None:
    """quantize_int4 of k and v [B, G, S, D] to places `at` ... of a cache, and what dequantize_int4 makes of that in
    their dtype, as one kernel; None where there is none: on a CPU, under torch.compile, with gradients. Nothing is
    stored then.

    cache: of keys, then of values, codes uint8 [B, G, L, D / 2], scales and lows bfloat16 [B, G, L, D / group],
    contiguous, at + S <= L.
    """
    if not k.is_cuda or not unseen(k, v, *cache):
        return None
    key = *map(like, (k, v, *cache)), "store"
    if (again := READY.find(key)) is not None:
        return again(k, v, cache, at)
    group = k.shape[-1] // cache[1].shape[-1]
    if not _kernel_takes(k, k.numel() // group, group, k.dtype, v.dtype) or v.shape != k.shape or v.dtype != k.dtype:
        return None
    if not all(t.is_contiguous() for t in cache):
        return None
    from quantrot.kernels import int4_triton

    run = int4_triton.prepare_store(k, v, group, cache[0].shape[2])
    return READY.keep(key, run, k.get_device())(k, v, cache, at)


def _group_of(codes: Tensor, scale: Tensor) -> int:
    return 2 * codes.shape[-1] // scale.shape[-1]


def _kernel_takes(x: Tensor, groups: int, group: int, *dtypes: torch.dtype) -> bool:
    sizes = x.dim() <= 4 and 0 < groups <= 1 << 30 and group % 2 == 0 and 0 < group <= LARGEST_GROUP
    return sizes and all(dtype in KERNEL_DTYPES for dtype in dtypes) and uses_triton(x, "auto")


@implement("quantrot::quantize_int4")
def _quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    if _kernel_takes(x, x.numel() // group, group, x.dtype):
        from quantrot.kernels import int4_triton

        return int4_triton.prepare_quantize(x, group)(x)
    codes, scale, low = _plain_quantize(x, group)
    return codes.contiguous(), scale.contiguous(), low.contiguous()


@torch.library.register_fake("quantrot::quantize_int4")
def _quantize_fake(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    *rows, width = x.shape
    scale = x.new_empty((*rows, width // group), dtype=torch.bfloat16)
    return x.new_empty((*rows, width // 2), dtype=torch.uint8), scale, torch.empty_like(scale)


@implement("quantrot::dequantize_int4")
def _dequantize(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    if _kernel_takes(codes, scale.numel(), _group_of(codes, scale), scale.dtype, low.dtype, dtype):
        from quantrot.kernels import int4_triton

        return int4_triton.prepare_dequantize(codes, scale, low, dtype)(codes, scale, low)
    return _plain_dequantize(codes, scale, low, dtype).contiguous()


@torch.library.register_fake("quantrot::dequantize_int4")
def _dequantize_fake(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    *rows, half = codes.shape
    return codes.new_empty((*rows, 2 * half), dtype=dtype)
