"""MXFP4 (OCP Microscaling v1.0): groups of 32 e2m1 values along the last dimension share one e8m0 scale.

    quantize_mxfp4            [..., K] float         -> packed uint8 [..., K/2], scale uint8 [..., K/32]
    dequantize_mxfp4          packed, scale          -> [..., K] float
    hadamard_quantize_mxfp4   the same after a Hadamard transform, of the tensor or its transpose; clip mask; stochastic
    round_trip_mxfp4          [..., K] float         -> what the two make of it, in one step
    requantize_mxfp4          packed, scale          -> the transpose of it, transformed and quantized again
    expand_mxfp4              packed, scale          -> e4m3 [N, K] and one power of two a row: the same values
    mxfp4_product             packed by packed       -> [M, N], exact in its operands
    mxfp4_gemm                x by a packed weight   -> [..., N], x as it is, in e4m3, or in MXFP4
    mxfp4_fused               the same with a norm or a gate before it, a residual behind it
    mxfp4_normed              the same behind a norm and an addition before it, for many tokens

A code is sign << 3 | index into E2M1; byte j holds column 2j in its low nibble and column 2j + 1 in its high one. A
scale byte e means 2^(e - 127). Rounding is to nearest, ties to the even code; values past 6 scales saturate. -0 keeps
its sign. A group that holds a NaN or an infinity, or (quest) whose squares overflow float32, gets the scale byte 255,
which dequantizes to NaN, and codes 0. An all-zero group gets the rule's least scale byte, 0 (2^-127), of mse 1.
Arithmetic is float32 whatever the input type, in the fixed order of the reference: codes, scales and masks are the same
bits on every backend. But for one: a transform's result that is -0, because half of its rows are -0 and the others
cancel, may be 0 where codes are quantized again on Hopper.

Backends: "triton" (CUDA), "reference" (plain torch), and for the products "cublas" (FP8 tensor cores, capability 8.9
and later) and "hopper" (CUDA C++, few tokens, and bfloat16 ones in any number). "auto" takes CUDA C++ on capability
9.0 with cuda.core installed, to quantize, too, else the first that the device, the shapes and the installation have.
The operators are torch.library's, `quantrot::mxfp4_*`: torch.compile and CUDA graphs see opaque functions, with the
same bits.

Sources: OCP Microscaling Formats v1.0 section 6.3 (floor); QuEST, arXiv:2502.05003 (quest); Quartet, arXiv:2505.14669
(absmax34, the backward pass); Salmon et al., SC 2011 (Philox).
"""

from quantrot.kernels.mxfp4.autograd import HadamardGemm, Mxfp4Gemm, drawn_numbers
from quantrot.kernels.mxfp4.fused import has_fused, mxfp4_fused
from quantrot.kernels.mxfp4.gemm import mxfp4_gemm, mxfp4_product
from quantrot.kernels.mxfp4.normed import has_normed, mxfp4_normed
from quantrot.kernels.mxfp4.operators import (
    dequantize_mxfp4,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    has_kernels,
    masked_hadamard,
    quantize_mxfp4,
    requantize_mxfp4,
    round_trip_mxfp4,
)
from quantrot.kernels.mxfp4.reference import (
    E2M1,
    E2M1_MAX,
    GROUP,
    TOP,
    WINDOW,
    ScaleRule,
    power_of_two,
    stored_share,
    unpack_bits,
)

__all__ = [
    "E2M1",
    "E2M1_MAX",
    "GROUP",
    "TOP",
    "WINDOW",
    "HadamardGemm",
    "Mxfp4Gemm",
    "ScaleRule",
    "dequantize_mxfp4",
    "drawn_numbers",
    "expand_mxfp4",
    "hadamard_quantize_mxfp4",
    "has_fused",
    "has_kernels",
    "has_normed",
    "masked_hadamard",
    "mxfp4_fused",
    "mxfp4_gemm",
    "mxfp4_normed",
    "mxfp4_product",
    "power_of_two",
    "quantize_mxfp4",
    "requantize_mxfp4",
    "round_trip_mxfp4",
    "stored_share",
    "unpack_bits",
]
