"""RMSNorm of tokens, or of a sum, and its quantization in one kernel, for any number of tokens."""

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.operators import NO_GRADIENT, check_input, has_kernels, outputs, quantize
from quantrot.kernels.fp8.reference import E4M3, Fp8ScaleRule, rms_norm
from quantrot.kernels.operators import check_around, constant, implement, number, register_no_gradient
from quantrot.kernels.ready import Ready, Run, like, unseen

ROW = (1, 128)
READY = Ready()

torch.library.define(
    "quantrot::quantize_fp8_normed",
    "(Tensor x, Tensor norm, float epsilon, Tensor? added, str rule) -> (Tensor, Tensor, Tensor)",
)


def quantize_fp8_normed(
    x: Tensor,
    norm: Tensor,
    epsilon: float,
    *,
    added: Tensor | None = None,
    scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.bf16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, x + added), the codes e4m3 [M, K] and scales float32 [M, ceil(K / 128)], transposed in memory, of
    RMSNorm of x + added, or of x, in 1 x 128 blocks.

    x [M, K] float32, float16 or bfloat16, added the same, norm [K] of x's dtype; the sum is rounded to that, divided by
    sqrt(mean of its squares + epsilon), rounded, and multiplied by norm. The bits of fp8_linear's codes, in one kernel
    on Hopper where K is at most 16384; elsewhere the operators one after the other, where the mean's sum may give a few
    numbers their neighbours. norm is not written while this runs. Not differentiable. ValueError for what does not fit.
    """
    key, operands = None, (x, norm, added)
    if x.is_cuda and unseen(*operands):
        key = *map(like, operands), epsilon, scale_rule
        if (again := READY.find(key)) is not None:
            return again(*operands)
    rule = check_input("quantize_fp8_normed", x, ROW, scale_rule, "auto")
    for name, given in (("norm", norm), ("added", x if added is None else added)):
        if not isinstance(given, Tensor):
            raise ValueError(f"{name}: {given!r}; allowed: a tensor of x's dtype, {x.dtype}, on {x.device}")
    check_around(x, x.shape[1], norm, added, residual_name="added")
    epsilon = number("epsilon", epsilon, "non-negative, finite")
    if key and (run := _in_one_kernel(x, norm, epsilon, added, rule)):
        return READY.keep(key, run, x.get_device())(*operands)
    codes, scale, total = torch.ops.quantrot.quantize_fp8_normed(x, norm, epsilon, added, rule)
    return codes, scale, x if added is None else total


@constant
def has_normed(k: int, device: torch.device) -> bool:
    """Whether quantize_fp8_normed, and fp8_linear with a norm, are one kernel and one or two there, for 16-bit tokens
    [M, k] of any number."""
    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.fp8 import blocks

    return k % 8 == 0 and k <= blocks.MOST_NORMED


def _in_one_kernel(x: Tensor, norm: Tensor, epsilon: float, added: Tensor | None, rule: str) -> Run | None:
    """As a function of x, norm and added; None where Hopper has no kernel for them."""
    from quantrot.kernels.fp8 import blocks

    if not has_kernels(x.device) or not blocks.supports_normed(x, norm, added, many=True):
        return None
    (q, scale), (rows, columns) = outputs(x, ROW, True), x.shape
    plan = blocks.many_plan(rows, columns, added is not None)
    quantize_x = blocks.prepare_normed(x, norm, epsilon, q, scale, rule, True, plan)

    def run(x: Tensor, norm: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, scale = outputs(x, ROW, True)
        total = x if added is None else torch.empty_like(x)
        quantize_x(x, norm, q, scale, *(() if added is None else (added, total)))
        return q, scale, total

    return run


@implement("quantrot::quantize_fp8_normed")
def _normed(x: Tensor, norm: Tensor, epsilon: float, added: Tensor | None, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    if run := _in_one_kernel(x, norm, epsilon, added, rule):
        codes, scale, total = run(x, norm, added)
    else:
        total = x if added is None else (x + added).contiguous()
        codes, scale = quantize(rms_norm(total, norm, epsilon), *ROW, rule, True, "auto")
    return codes, scale, x.new_empty(0) if added is None else total  # an operator returns no argument


@torch.library.register_fake("quantrot::quantize_fp8_normed")
def _normed_fake(x, norm, epsilon, added, rule):
    scale = x.new_empty((-(-x.shape[1] // 128), x.shape[0]), dtype=torch.float32).T
    total = x.new_empty(0) if added is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty(x.shape, dtype=E4M3), scale, total


register_no_gradient("quantrot::quantize_fp8_normed", NO_GRADIENT)
