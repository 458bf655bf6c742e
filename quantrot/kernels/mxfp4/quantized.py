"""Tokens in e4m3 by a packed MXFP4 weight on FP8 tensor cores: what quantizes them, and the products behind it.

A quantizer makes of tokens [M, K] (e4m3 [M, K], a float32 scale a token, codes, what else it gives). codes: of MXFP4,
how many groups of each token e4m3's window does not hold, and packed and scale of the tokens that have some; of FP8
None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import quantize_fp8_block
from quantrot.kernels.mxfp4.operators import expand, prepare_expanded
from quantrot.kernels.mxfp4.reference import ScaleRule
from quantrot.kernels.ready import Run


def scaled_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(a a_scale) (b b_scale)^T, e4m3 [M, K] and [N, K] with float32 scales [M, 1] and [1, N], by cuBLAS.

    bfloat16 results take the fast accumulation: 1223 against 1119 TFLOP/s at 4096^3, with the same error, the
    rounding's own, where both are e2m1, and 2.3e-3 for 1.7e-3 where a is e4m3 with 14336 columns. The others sum in
    float32 and are scaled after, which powers of two make exact.
    """
    if 0 in (a.shape[0], b.shape[0], a.shape[1]):
        return torch.zeros(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    if dtype == torch.bfloat16:
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)
    one = a_scale.new_ones(())
    y = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False)
    return y.mul_(a_scale).mul_(b_scale).to(dtype)


def fp8_tokens(rows: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """e4m3 [M, K] and a float32 scale a token."""
    qdata, scale = quantize_fp8_block(rows, (1, 0), rule)
    return qdata, scale.view(-1)


def quantizer(
    rows: Tensor, activations: str, rule: str, hadamard: int, *, gated: bool = False, arranged: bool = False
) -> Run:
    """As a function of rows [M, K] like these (gated: [M, 2 K]), turned in blocks of `hadamard` and quantized to MXFP4,
    or as they are to FP8. arranged: for `by_batch`."""
    if activations == "fp8":
        from quantrot.kernels.mxfp4 import hopper_batch

        quantize = hopper_batch.prepare_quantizer(rows, rule) if arranged else lambda rows: fp8_tokens(rows, rule)
        return lambda rows: (*quantize(rows), None)
    if arranged:
        from quantrot.kernels.mxfp4 import hopper_rows

        expanded = hopper_rows.prepare_expanded(rows, ScaleRule(rule), hadamard, None, arranged=True, gated=gated)
    else:
        expanded = prepare_expanded(rows, rule, hadamard, gated)

    def run(rows: Tensor) -> tuple[Tensor, Tensor, Any]:
        tokens, token_scale, *codes = expanded(rows)
        return tokens, token_scale, codes

    return run


def by_batch(quantize: Run, count: int, packed: Tensor, scale: Tensor, dtype: torch.dtype, settled: bool) -> Run:
    """(The product, what the quantizer gives beside codes) in the batch's kernel, as a function of packed, scale and
    what `quantize` takes, `count` tokens."""
    from quantrot.kernels.mxfp4 import hopper_batch

    multiply = hopper_batch.prepare(count, packed, scale, dtype, settled=settled)

    def run(packed: Tensor, scale: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        tokens, token_scale, codes, *rest = quantize(*given)
        return multiply(tokens, token_scale, packed, scale, codes), *rest

    return run


def by_cublas(quantize: Run, dtype: torch.dtype) -> Run:
    """The same by cuBLAS and the weight expanded to e4m3."""
    from quantrot.kernels.mxfp4 import triton_gemm

    def run(packed: Tensor, scale: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        weight_expanded = expander(packed, scale)
        tokens, token_scale, codes, *rest = quantize(*given)
        weight, weight_scale, weight_outside = weight_expanded()
        y = scaled_product(tokens, token_scale[:, None], weight, weight_scale[None], dtype)
        if codes is not None:  # exact in the rows that are inside, whose codes are not written
            outside, *written = codes
            codes = *written, outside
        triton_gemm.repair(y, packed, scale, weight_outside, packed=codes, wide=(tokens, token_scale))
        return y, *rest

    return run


def alone(product: Run) -> Run:
    """Such a product of tokens that the quantizer takes by themselves, as a function of tokens, packed and scale."""
    return lambda rows, packed, scale: product(packed, scale, rows)[0]


def expander(packed: Tensor, scale: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """mxfp4_expand of a weight, to be made before the tokens' quantizer and called right after it: on Hopper they then
    run at the same time."""
    if not packed.numel() or not nvrtc.available(packed.device):
        return lambda: expand(packed, scale)
    from quantrot.kernels.mxfp4 import hopper_rows, triton_rows

    room = triton_rows.room(packed.shape[0], 2 * packed.shape[1], packed.device)
    return lambda: hopper_rows.expand(packed, scale, room)
