"""FP8 block quantization and products in plain torch: the definition that every kernel is held to, and the CPU's.

Codes and scales of every backend are these bits. Products are these values up to float32 sums and one rounding:
MAX_RELATIVE_ERROR bounds ||y - exact|| / ||exact|| against float64 of the dequantized operands.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.hadamard.reference import hadamard_reference
from quantrot.kernels.operators import check_device, eager_inference
from quantrot.kernels.scratch import LARGEST

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LEAST_SCALE = torch.finfo(torch.float32).tiny
NAN_CODE = 0x7F
MAX_RELATIVE_ERROR = {  # of a product; right: one rounding alone
    torch.bfloat16: 2e-3,  # 1.66e-3
    torch.float16: 6e-4,  # 2.07e-4; the rest, and float32's, is the tensor core's 14-bit sums over 128 of K
    torch.float32: 6e-4,
}


class Fp8ScaleRule(StrEnum):
    """What the scale amax / 448 is rounded to before it divides.

    exact  float32 as it is
    bf16   the nearest bfloat16: engines that hold scales in bfloat16 then dequantize to the same bits
    pow2   the next power of two up (e8m0 layouts): nothing saturates
    """

    exact = "exact"
    bf16 = "bf16"
    pow2 = "pow2"


def round_scale(amax: Tensor, rule: Fp8ScaleRule) -> Tensor:
    most = amax.new_full((), E4M3_MAX)  # a tensor: on a GPU torch multiplies by a number's reciprocal instead
    return rounded(torch.where(amax == 0, 1.0, amax / most).clamp(min=LEAST_SCALE), rule)


def rounded(scale: Tensor, rule: Fp8ScaleRule) -> Tensor:
    """Scales of LEAST_SCALE and more as the rule stores them."""
    if rule is Fp8ScaleRule.bf16:
        return scale.to(torch.bfloat16).to(torch.float32)
    if rule is Fp8ScaleRule.pow2:
        mantissa = 0x7FFFFF
        up = ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
        return torch.where(torch.isfinite(scale), up, scale)
    return scale


def whole(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """The block with 0 replaced by the dimension (at least 1, for empty tensors)."""
    return block[0] or max(shape[0], 1), block[1] or max(shape[1], 1)


def scale_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """[ceil(M / bm), ceil(K / bn)] of a matrix."""
    rows, columns = whole(block, shape)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [M, K] of whole blocks as [gm, bm, gn, bn], a view."""
    return x.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))


def _expand(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """scale [gm, gn] repeated over its blocks to `shape`; broadcasting does the work where a block spans a row."""
    if block[0] > 1:
        scale = scale.repeat_interleave(block[0], 0)[: shape[0]]
    if block[1] < shape[1]:
        scale = scale.repeat_interleave(block[1], 1)[:, : shape[1]]
    return scale


def _beside(x: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """x [M, K] and scale [gm, gn] in shapes where every element meets its block's scale; x is a view."""
    if x.shape[0] % block[0] or x.shape[1] % block[1]:
        return x, _expand(scale, block, x.shape)
    return tiles(x, block), scale[:, None, :, None]  # nothing is repeated in memory


def quantize_reference(x: Tensor, block: tuple[int, int], rule: str) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (qdata e4m3 [M, K], scale float32), both contiguous."""
    block = whole(block, x.shape)
    values = x.to(torch.float32)
    edges = -x.shape[1] % block[1], -x.shape[0] % block[0]
    padded = F.pad(values, (0, edges[0], 0, edges[1])) if any(edges) else values
    amax = tiles(padded.abs(), block).amax(3).amax(1)  # of both at once takes a CPU three times as long
    scale = round_scale(amax, Fp8ScaleRule(rule))
    scaled = torch.div(*_beside(values, scale, block))
    qdata = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).reshape(x.shape)
    wrong = ~torch.isfinite(scale)
    if x.device.type != "cpu" or wrong.any():  # rare: a CPU saves the passes, a GPU must not wait for the answer
        qdata.view(torch.uint8).masked_fill_(_expand(wrong, block, x.shape), NAN_CODE)
        scale.masked_fill_(scale.isnan(), torch.nan)  # one NaN for all, whatever its bits were
    return qdata.contiguous(), scale.contiguous()


def _widened(qdata: Tensor) -> Tensor:
    """float32 of e4m3: as float16, whose exponent has a bit more, 2^-8 of it. 0.37 ms for 512 x 1536 elements on a
    CPU, where torch's conversion takes 2.3."""
    codes = qdata.view(torch.int8)
    halves = (codes.to(torch.int16) << 7).bitwise_and_(~0x4000).view(torch.float16)
    return halves.to(torch.float32).mul_(2.0**8).masked_fill_((codes & 127) == NAN_CODE, torch.nan)


def gate(x: Tensor) -> Tensor:
    """[M, 2 K], gate and up -> silu(gate) * up, both rounded to x's dtype, as an MLP's modules have them."""
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., K] over its root mean square, in float32 or wider, times weight, each rounded to x's dtype: as Llama."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def dequantize_fp8_block(
    qdata: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[M, K] in `dtype` from e4m3 [M, K] and its scales: the float32 product, rounded once."""
    fits = qdata.dtype == E4M3 and qdata.dim() == 2 and len(block) == 2 and scale.is_floating_point()
    if not fits or not dtype.is_floating_point or tuple(scale.shape) != scale_shape(qdata.shape, block):
        raise ValueError(
            f"qdata: {qdata.dtype} {tuple(qdata.shape)}, scale: {tuple(scale.shape)}, block: {tuple(block)}; allowed: "
            f"{E4M3} [M, K] and a scale a block, of (rows, columns), in floats; dtype {dtype} is to be of floats too"
        )
    check_device(qdata=qdata, scale=scale)
    block = whole(block, qdata.shape)
    step = max(LARGEST // max(qdata.shape[1] * block[0], 1), 1)  # blocks
    if qdata.device.type != "cpu" or len(scale) <= step or not eager_inference(qdata, scale):
        return _dequantized(qdata, scale, block, dtype)
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    for start in range(0, len(scale), step):  # 4096 x 4096: 27 ms, all at once 150
        rows = slice(start * block[0], (start + step) * block[0])
        out[rows] = _dequantized(qdata[rows], scale[start : start + step], block, dtype)
    return out


def _dequantized(qdata: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    wide = qdata.to(torch.float32) if qdata.is_cuda else _widened(qdata)
    elements, scales = _beside(wide, scale, block)
    elements.mul_(scales)
    return wide.to(dtype)


def both_ways_reference(x: Tensor, block: tuple[int, int], rule: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(qdata, scale, qdata_t, scale_t) of x and of its transpose, M padded by zeros to 128s, each in `block`."""
    qdata, scale = quantize_reference(x, block, rule)
    turned = F.pad(x, (0, 0, 0, -x.shape[0] % 128)).T
    return qdata, scale, *quantize_reference(turned, block, rule)


def hadamard_quantize_reference(
    x: Tensor, signs: Tensor | None, order: int, factor: float, block: tuple[int, int], rule: str
) -> tuple[Tensor, Tensor]:
    """The transform in float32, and its float32 values quantized."""
    return quantize_reference(hadamard_reference(x.to(torch.float32), signs, order, factor), block, rule)


def gemm_reference(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """a [M, K] times the transpose of b [N, K]: dequantized to float32, multiplied there, rounded once."""
    left = dequantize_fp8_block(a, a_scale, a_block, torch.float32)
    right = dequantize_fp8_block(b, b_scale, b_block, torch.float32)
    return F.linear(left, right, None if bias is None else bias.to(torch.float32)).to(out_dtype)
