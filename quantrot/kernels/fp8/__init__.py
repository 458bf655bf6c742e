"""FP8 (e4m3fn) with float32 scales on two-dimensional blocks: quantization, and the product of two quantized matrices.

    quantize_fp8_block       x [M, K] float -> qdata e4m3 [M, K], scale float32 [ceil(M / bm), ceil(K / bn)]
    hadamard_quantize_fp8    the same of x turned by an online Hadamard, in one kernel
    quantize_fp8_both_ways   x and its transpose, in one read: what training multiplies
    quantize_fp8_normed      RMSNorm of x, or of a sum, in one kernel
    dequantize_fp8_block     qdata, scale   -> [M, K] float
    fp8_block_gemm           a [M, K] by the transpose of b [N, K], both quantized -> [M, N]
    fp8_linear               x [M, K] quantized in 1 x 128 blocks, by the transpose of b [N, K], quantized -> [M, N]

x ~= qdata * scale, the scale of a block being amax / 448. Division, rounding (to nearest, ties to even) and saturation
at +-448 are float32's; ragged edge blocks use the elements that exist. An all-zero block gets scale 1; -0 keeps its
sign; scales are at least 2^-126. A NaN makes its block's scale NaN, an infinity infinite, and all codes of such a block
are NaN (0x7F): it dequantizes to NaN. Codes and scales of every backend are the same bits.

`gated`: x is [M, 2 K], the gate and up projections of an MLP, and what is quantized is silu(gate) * up in x's dtype.

A block dimension of 0 means the whole dimension: (1, 0) is one scale a row (per channel, per token), (0, 0) per tensor.

A row's codes and scales depend on no other row while a block has one row. Products: "hopper" and "triton", of which
"auto" takes the first that applies, sum K in the same order for any M, so a row alone has the bits that it has in a
batch; "cublas" chooses its kernel by M and promises no such thing. "fastest" takes it where "hopper" does not apply.

The operators are torch.library's, `quantrot::...`: torch.compile and CUDA graphs see opaque functions. Sources:
GridQuant's 2D-block scheme; DeepSeek-V3, arXiv:2412.19437, section 3.3 (1 x 128 by 128 x 128); QuaRot,
arXiv:2404.00456 (the Hadamard).
"""

from quantrot.kernels.fp8.fused import fp8_linear, has_fused
from quantrot.kernels.fp8.gemm import fp8_block_gemm
from quantrot.kernels.fp8.normed import has_normed, quantize_fp8_normed
from quantrot.kernels.fp8.operators import (
    hadamard_quantize_fp8,
    has_kernels,
    quantize_fp8_block,
    quantize_fp8_both_ways,
)
from quantrot.kernels.fp8.reference import E4M3, E4M3_MAX, Fp8ScaleRule, dequantize_fp8_block

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "Fp8ScaleRule",
    "dequantize_fp8_block",
    "fp8_block_gemm",
    "fp8_linear",
    "hadamard_quantize_fp8",
    "has_fused",
    "has_kernels",
    "has_normed",
    "quantize_fp8_block",
    "quantize_fp8_both_ways",
    "quantize_fp8_normed",
]
