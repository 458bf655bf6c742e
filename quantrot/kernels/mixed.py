"""Mixed-input GEMM: wide activations by an 8-bit integer weight.

    quantize_int8    w [N, K] float -> qdata int8 [N, K], scale bfloat16 [N, K / group]
    dequantize_int8  qdata, scale   -> [N, K] float
    pack_int8        int8 [N, K]    -> int32 [N, K / 4], the layout of compressed-tensors' pack-quantized
    mixed_gemm       x [..., K] by qdata [N, K] -> [..., N]

Symmetric: w ~= qdata * scale with scale = amax / 127 of the group, rounded to bfloat16 before it divides; qdata is
rounded to nearest, ties to even, within [-127, 127] (a scale rounded down saturates). An all-zero group gets scale 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

INT8_MAX = 127.0


def quantize_int8(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """w [N, K] float; group: columns that share a scale, a divisor of K (K itself: per channel). See the file's top."""
    if group < 1 or w.shape[-1] % group:
        raise ValueError(f"group is {group}, which does not divide the {w.shape[-1]} columns of w")
    groups = w.to(torch.float32).unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / INT8_MAX).clamp_(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    qdata = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return qdata.flatten(-2).to(torch.int8), scale


def dequantize_int8(qdata: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, K] in `dtype`: the float32 product of each code and its group's scale, rounded once."""
    groups = qdata.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale.to(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)


def pack_int8(qdata: Tensor) -> Tensor:
    """int8 [N, K] -> int32 [N, ceil(K / 4)]: bytes q + 128, column 4i in the low byte; missing columns are 0 bytes."""
    unsigned = (qdata.to(torch.int16) + 128).to(torch.uint8)
    return F.pad(unsigned, (0, -qdata.shape[-1] % 4)).view(torch.int32)


def unpack_int8(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_int8`: int8 [N, columns]."""
    return (packed.view(torch.uint8)[..., :columns].to(torch.int16) - 128).to(torch.int8)


def mixed_gemm(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transpose of an int8 weight [N, K]: [..., N] in x's dtype, accumulated by `F.linear`."""
    return F.linear(x, dequantize_int8(qdata, scale, x.dtype), bias)
