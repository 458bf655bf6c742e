"""Tokens quantized and multiplied by a weight, with what a decoder layer has before and behind the product."""

from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import hopper
from quantrot.kernels.fp8.gemm import gemm
from quantrot.kernels.fp8.operators import (
    NO_GRADIENT,
    check_input,
    check_rest,
    check_scale,
    has_kernels,
    outputs,
    quantize,
)
from quantrot.kernels.fp8.reference import E4M3, Fp8ScaleRule, gate, rms_norm
from quantrot.kernels.operators import check_around, constant, implement, number, register_no_gradient
from quantrot.kernels.ready import Ready, Run, like, unseen

ROW = (1, 128)
READY = Ready()

torch.library.define(
    "quantrot::fp8_linear",
    "(Tensor x, Tensor b, Tensor b_scale, int[] b_block, str rule, Tensor? bias, str backend, "
    "bool b_settled=False, Tensor? norm=None, float epsilon=0.0, Tensor? residual=None, bool gates=False, "
    "bool gated=False) -> Tensor",
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
    gated: bool = False,
    backend: str = "auto",
    b_settled: bool = False,
) -> Tensor:
    """x [M, K] (float32, float16, bfloat16) in 1 x 128 blocks times the transpose of b [N, K], plus bias [N]: [M, N] in
    x's dtype.

    The bits of quantize_fp8_block and fp8_block_gemm one after the other, which is what it does, but for one or two
    tokens of 16 bits, and thousands in bfloat16, on Hopper: there one kernel does both, and "auto" takes it.

    norm [K], of x's dtype: x is first divided by sqrt(mean(x^2) + epsilon), rounded, and multiplied by norm, where the
    sum's order may give a few numbers their neighbours in x's dtype. gated, without norm: x is gate and up side by
    side, [M, 2 K], and silu(gate) * up is what is quantized. residual [M, N], of x's dtype, is added to the rounded
    result. gates: b is of gate and up, one above the other, and the result is silu(gate) * up, [M, N / 2]. On Hopper up
    to 64 tokens take one or two kernels with all of these, but for gates of more than one token, of an N that is no
    multiple of 128, and of channel scales; more take two with a norm alone, of at most 16384 columns.

    b_settled: as fp8_block_gemm's, of b and norm. backend: "auto", "hopper" (one kernel), "reference". Not
    differentiable. ValueError for shapes or dtypes that do not fit, or for a backend that cannot run.
    """
    key, operands = None, (x, b, b_scale, bias, norm, residual)
    if x.is_cuda and backend == "auto" and unseen(*operands):
        key = *map(like, operands), tuple(b_block), scale_rule, epsilon, gates, gated, b_settled
        if (again := READY.find(key)) is not None:
            return again(*operands)
    rule = check_input("fp8_linear", x, ROW, scale_rule, "auto")
    if gated and (norm is not None or x.shape[1] % 2):
        found = f"x {tuple(x.shape)}" + ("" if norm is None else ", with a norm")
        raise ValueError(f"gated: {found}; it takes an even number of columns, gate and up side by side, and no norm")
    inner = x[:, : x.shape[1] // 2] if gated else x
    k = inner.shape[1]
    if b.dim() != 2 or b.dtype != E4M3 or b.shape[1] != k:
        raise ValueError(f"b: {b.dtype} {tuple(b.shape)}; it must be {E4M3} (N, {k}), of x's {k} columns")
    check_scale("b", b, b_scale, b_block)
    check_around(inner, b.shape[0], norm, residual)
    if gates and (residual is not None or b.shape[0] % 2):
        raise ValueError(f"gates: b {tuple(b.shape)}; it takes an even number of rows, and no residual")
    check_rest(b, x.dtype, bias, b_scale=b_scale, x=x)
    if backend not in ("auto", "hopper", "reference"):
        raise ValueError(f"backend: {backend!r}; allowed: auto, hopper, reference")
    rest = norm, number("epsilon", epsilon, "non-negative, finite"), residual, gates, gated
    if key and (run := _one_or_two_kernels(x, b, b_scale, b_block, rule, bias, b_settled, *rest)):
        return READY.keep(key, run, x.get_device())(*operands)
    return torch.ops.quantrot.fp8_linear(x, b, b_scale, list(b_block), rule, bias, backend, b_settled, *rest)


def has_fused(tokens: int, n: int, k: int, device: torch.device) -> bool:
    """Whether fp8_linear of so many tokens of 16 bits and a weight [n, k], with a norm or gated and with a residual (of
    one token also: gates), is in one or two kernels there."""
    if tokens > 1:  # a branch: of torch.compile's numbers that are not known yet it is no constant
        able = _has_fused(True, n, k, device)  # first: a device without kernels does not ask how many they are
        return able and tokens <= hopper.DECODE_ROWS
    return tokens == 1 and _has_fused(False, n, k, device)


@constant
def _has_fused(several: bool, n: int, k: int, device: torch.device) -> bool:
    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.fp8 import blocks, linear

    return k % 16 == 0 and n % 8 == 0 and k <= blocks.MOST_COLUMNS if several else linear.takes_one(n, k)


def _one_or_two_kernels(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    rule: str,
    bias: Tensor | None,
    b_settled: bool,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gates: bool,
    gated: bool,
    *,
    in_one: bool = False,
) -> Run | None:
    """All of it in the kernel of one or two tokens, or (not in_one) in the quantizer's and the product's, as a function
    of x, b, its scales, bias, norm and residual; None where these are not for them, as with a residual and more than 64
    tokens, and where `prompt` may be."""
    from quantrot.kernels.fp8 import blocks, linear, prompt

    if not has_kernels(x.device) or not len(x):
        return None
    if not gated and linear.supports(x, b, b_scale, b_block, bias, norm, residual, gates):
        rest = bias, norm, epsilon, residual, gates
        return linear.prepare(x, b, b_scale, b_block, rule, *rest, b_settled=b_settled)
    if in_one or (norm is None and prompt.pays(len(x), *b.shape)):
        return None
    many = len(x) > hopper.DECODE_ROWS
    if not (blocks.supports(x, ROW, gated) if norm is None else blocks.supports_normed(x, norm, many=many)):
        return None
    q, scale = outputs(x, ROW, True, gated)
    operands: Any = q, scale, b, b_scale, ROW, b_block, x.dtype, bias, residual
    if not hopper.supports(*operands):
        return None
    if norm is None:
        quantize_x = blocks.prepare(x, q, scale, ROW, rule, gated)
    else:
        rows, columns = x.shape
        plan = blocks.many_plan(rows, columns, False) if many else blocks.normed_plan(columns)
        quantize_x = blocks.prepare_normed(x, norm, epsilon, q, scale, rule, b_settled, plan)
    product = hopper.prepare(*operands, b_settled=b_settled)

    def in_two(
        x: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        q, scale = outputs(x, ROW, True, gated)
        quantize_x(*((x,) if norm is None else (x, norm)), q, scale)
        y = product(q, scale, b, b_scale, bias, residual)
        return gate(y) if gates else y

    return in_two


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
    gated: bool = False,
) -> Tensor:
    block, around = (b_block[0], b_block[1]), (norm, epsilon, residual, gates, gated)
    if backend != "reference" and has_kernels(x.device):
        from quantrot.kernels.fp8 import prompt

        operands = x, b, b_scale, block, rule, bias, b_settled
        if run := _one_or_two_kernels(*operands, *around, in_one=backend == "hopper"):
            return run(x, b, b_scale, bias, norm, residual)
        plain = norm is None and residual is None and not (gates or gated)
        if plain and prompt.supports(x, b, b_scale, block, bias):
            return prompt.linear(x, b, b_scale, block, rule, bias, b_settled=b_settled)
    if backend == "hopper":
        raise ValueError(
            "backend: 'hopper' needs an NVIDIA GPU of capability 9.0 and one or two tokens that are not gated, or "
            f"thousands in bfloat16 and a plain product; x is {x.dtype} {tuple(x.shape)}"
        )
    x = x if norm is None else rms_norm(x, norm, epsilon)
    codes = quantize(x, 1, 128, rule, True, backend, gated)
    y = gemm(*codes, b, b_scale, list(ROW), b_block, x.dtype, bias, backend, b_settled)
    y = y if residual is None else y + residual
    return gate(y) if gates else y


@torch.library.register_fake("quantrot::fp8_linear")
def _linear_fake(
    x,
    b,
    b_scale,
    b_block,
    rule,
    bias,
    backend,
    b_settled=False,
    norm=None,
    epsilon=0.0,
    residual=None,
    gates=False,
    gated=False,
):
    return torch.empty((x.shape[0], b.shape[0] // (1 + gates)), dtype=x.dtype, device=x.device)


register_no_gradient("quantrot::fp8_linear", NO_GRADIENT)
