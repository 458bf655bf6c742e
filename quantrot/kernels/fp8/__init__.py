"""FP8 (e4m3fn) with float32 scales on two-dimensional blocks.

    quantize_fp8_block    x [M, K] float -> qdata e4m3 [M, K], scale float32 [ceil(M / bm), ceil(K / bn)]
    dequantize_fp8_block  qdata, scale   -> [M, K] float
    fp8_block_gemm        x quantized on the fly, by a quantized weight [N, K] -> [M, N]

x ~= qdata * scale, the scale of a block being amax / 448. Division, rounding (to nearest, ties to even) and saturation
at +-448 are float32's; ragged edge blocks use the elements that exist. An all-zero block gets scale 1; -0 keeps its
sign; a NaN or an infinity makes its block's scale NaN or infinite, so the block dequantizes to NaN.

A block dimension of 0 means the whole dimension: (1, 0) is one scale a row (per channel, per token), (0, 0) per tensor.
Sources: GridQuant's 2D-block scheme; DeepSeek-V3, arXiv:2412.19437, section 3.3 (1 x 128 by 128 x 128).
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX = 448.0
E4M3 = torch.float8_e4m3fn


class Fp8ScaleRule(StrEnum):
    """What the scale amax / 448 is rounded to before it divides.

    exact  float32 as it is
    bf16   the nearest bfloat16: engines that hold scales in bfloat16 then dequantize to the same bits
    pow2   the next power of two up (e8m0 layouts): nothing saturates
    """

    exact = "exact"
    bf16 = "bf16"
    pow2 = "pow2"


def _round_scale(amax: Tensor, rule: Fp8ScaleRule) -> Tensor:
    scale = torch.where(amax == 0, 1.0, amax / E4M3_MAX)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    if rule is Fp8ScaleRule.bf16:
        return scale.to(torch.bfloat16).to(torch.float32)
    if rule is Fp8ScaleRule.pow2:
        mantissa = 0x7FFFFF
        up = ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
        return torch.where(torch.isfinite(scale), up, scale)
    return scale


def _whole(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """The block with 0 replaced by the dimension (at least 1, for empty tensors)."""
    return block[0] or max(shape[0], 1), block[1] or max(shape[1], 1)


def _expand(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """scale [gm, gn] repeated over its blocks to `shape`; broadcasting does the work where a block spans a row."""
    if block[0] > 1:
        scale = scale.repeat_interleave(block[0], 0)[: shape[0]]
    if block[1] < shape[1]:
        scale = scale.repeat_interleave(block[1], 1)[:, : shape[1]]
    return scale


def quantize_fp8_block(
    x: Tensor, block: tuple[int, int] = (1, 128), scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.bf16
) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] float32, float16 or bfloat16 to e4m3 with one scale a block; see the top of the file.

    Returns (qdata e4m3 [M, K], scale float32 [ceil(M / bm), ceil(K / bn)]). ValueError for other than two dimensions.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; quantize_fp8_block takes [M, K]: flatten leading dimensions")
    block = _whole(block, x.shape)
    values = x.to(torch.float32)
    edges = -x.shape[1] % block[1], -x.shape[0] % block[0]
    padded = F.pad(values, (0, edges[0], 0, edges[1])) if any(edges) else values
    tiles = padded.abs().unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scale = _round_scale(tiles.amax((1, 3)), Fp8ScaleRule(scale_rule))
    scaled = values / _expand(scale, block, x.shape)
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def dequantize_fp8_block(
    qdata: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[M, K] in `dtype` from e4m3 [M, K] and its scales: the float32 product, rounded once."""
    expanded = _expand(scale, _whole(block, qdata.shape), qdata.shape)
    return qdata.to(torch.float32).mul_(expanded).to(dtype)


def fp8_block_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    a_block: tuple[int, int] = (1, 128),
    b_block: tuple[int, int] = (128, 128),
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] times the transpose of b [N, K], both e4m3 with block scales: [M, N] in out_dtype.

    The operands are dequantized to float32, multiplied and accumulated there, and the result is rounded once.
    """
    left = dequantize_fp8_block(a, a_scale, a_block, torch.float32)
    right = dequantize_fp8_block(b, b_scale, b_block, torch.float32)
    return F.linear(left, right, None if bias is None else bias.to(torch.float32)).to(out_dtype)
