"""Tokens quantized and multiplied by a weight, with what a decoder layer has before and behind the product."""

import torch
from torch import Tensor

from quantrot.kernels.fp8.gemm import gemm
from quantrot.kernels.fp8.operators import NO_GRADIENT, check_input, check_rest, check_scale, has_kernels, quantize
from quantrot.kernels.fp8.reference import E4M3, Fp8ScaleRule, gate, rms_norm
from quantrot.kernels.operators import check_around, constant, implement, register_no_gradient

torch.library.define(
    "quantrot::fp8_linear",
    "(Tensor x, Tensor b, Tensor b_scale, int[] b_block, str rule, Tensor? bias, str backend, "
    "bool b_settled=False, Tensor? norm=None, float epsilon=0.0, Tensor? residual=None, bool gates=False) -> Tensor",
)


def fp8_linear(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    b_block: tuple[int, int] = (128, 128),
    scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.bf16,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gates: bool = False,
    backend: str = "auto",
    b_settled: bool = False,
) -> Tensor:
    """x [M, K] (float32, float16, bfloat16) in 1 x 128 blocks times the transpose of b [N, K], plus bias [N]: [M, N] in
    x's dtype.

    The bits of quantize_fp8_block and fp8_block_gemm one after the other, which is what it does, but for one or two
    tokens of 16 bits, and thousands in bfloat16, on Hopper: there one kernel does both, and "auto" takes it. norm [K],
    of x's dtype: x is first divided by sqrt(mean(x^2) + epsilon), rounded, and multiplied by norm, where the sum's
    order may give a few numbers their neighbours in x's dtype. residual [M, N], of x's dtype, is added to the rounded
    result. gates: b is of gate and up, one above the other, and the result is silu(gate) * up, [M, N / 2].

    b_settled: as fp8_block_gemm's, of b and norm. backend: "auto", "hopper" (one kernel), "reference". Not
    differentiable. ValueError for shapes or dtypes that do not fit, or for a backend that cannot run.
    """
    rule = check_input("fp8_linear", x, (1, 128), scale_rule, "auto")
    k = x.shape[1]
    if b.dim() != 2 or b.dtype != E4M3 or b.shape[1] != k:
        raise ValueError(f"b: {b.dtype} {tuple(b.shape)}; it must be {E4M3} (N, {k}), of x's {k} columns")
    check_scale("b", b, b_scale, b_block)
    check_around(x, b.shape[0], norm, residual)
    if gates and (residual is not None or b.shape[0] % 2):
        raise ValueError(f"gates: b {tuple(b.shape)}; it takes an even number of rows, and no residual")
    check_rest(b, x.dtype, bias, b_scale=b_scale, x=x)
    if backend not in ("auto", "hopper", "reference"):
        raise ValueError(f"backend: {backend!r}; allowed: auto, hopper, reference")
    rest = norm, epsilon, residual, gates
    return torch.ops.quantrot.fp8_linear(x, b, b_scale, list(b_block), rule, bias, backend, b_settled, *rest)


@constant
def has_one_kernel(n: int, k: int, device: torch.device) -> bool:
    """Whether fp8_linear of one token and a weight [n, k] is one kernel on this device."""
    from quantrot.kernels import nvrtc
    from quantrot.kernels.fp8 import linear

    return has_kernels(device) and nvrtc.available(device) and linear.takes_one(n, k)


@implement("quantrot::fp8_linear")
def _linear(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: list[int],
    rule: str,
    bias: Tensor | None,
    backend: str,
    b_settled: bool = False,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gates: bool = False,
) -> Tensor:
    block = b_block[0], b_block[1]
    if backend != "reference" and has_kernels(x.device):
        from quantrot.kernels.fp8 import linear, prompt

        if linear.supports(x, b, b_scale, block, bias, norm, residual, gates):
            rest = norm, epsilon, residual, gates
            return linear.linear(x, b, b_scale, block, rule, bias, *rest, b_settled=b_settled)
        if norm is None and residual is None and not gates and prompt.supports(x, b, b_scale, block, bias):
            return prompt.linear(x, b, b_scale, block, rule, bias, b_settled=b_settled)
    if backend == "hopper":
        raise ValueError(
            "backend: 'hopper' needs an NVIDIA GPU of capability 9.0 and few tokens, or thousands in bfloat16 and a "
            f"plain product; x is {x.dtype} {tuple(x.shape)}"
        )
    x = x if norm is None else rms_norm(x, norm, epsilon)
    q, scale = quantize(x, 1, 128, rule, True, backend)
    y = gemm(q, scale, b, b_scale, [1, 128], b_block, x.dtype, bias, backend, b_settled)
    return gate(y) if gates else y if residual is None else y + residual


@torch.library.register_fake("quantrot::fp8_linear")
def _linear_fake(
    x, b, b_scale, b_block, rule, bias, backend, b_settled=False, norm=None, epsilon=0.0, residual=None, gates=False
):
    return torch.empty((x.shape[0], b.shape[0] // (1 + gates)), dtype=x.dtype, device=x.device)


register_no_gradient("quantrot::fp8_linear", NO_GRADIENT)
