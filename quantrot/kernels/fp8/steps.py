"""The quantizers and products of a training linear, found at once: what its operators launch, one behind the other.

In eager mode the host sets the pace of a small training step, and six operators a linear each look for what to launch.

    forward    y, and what each gradient reads
    backward   dx and dw of those
"""

import torch
from torch import Tensor

from quantrot.kernels.fp8.gemm import check_product, chosen
from quantrot.kernels.fp8.operators import check_input, has_kernels, in_one_kernel, quantize, read_once
from quantrot.kernels.ready import Ready, Run, like, unseen

FORWARD, BACKWARD = Ready(), Ready()
ROW, SQUARE = (1, 128), (128, 128)

Codes = tuple[Tensor, Tensor]  # and their scales


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, wants_dx: bool, wants_dw: bool
) -> tuple[Tensor, Codes | None, Codes | None] | None:
    """y of x [M, K] and the weight [N, K], the weight's transpose for dx and x's for dw; None where operators do it."""
    if not x.is_cuda or not unseen(x, weight, bias):
        return None
    key = like(x), like(weight), like(bias), wants_dx, wants_dw
    if (again := FORWARD.find(key)) is None:
        if (run := prepare_forward(x, weight, bias, wants_dx, wants_dw)) is None:
            return None
        again = FORWARD.keep(key, run, x.get_device())
    made: tuple[Tensor, Codes | None, Codes | None] = again(x, weight, bias)
    return made


def backward(
    grad: Tensor, for_dx: Codes | None, for_dw: Codes | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None] | None:
    """dx and dw of grad [M, N], in grad's dtype and this one, each if what it reads is given; None where operators do
    it."""
    kept = *(for_dx or (None, None)), *(for_dw or (None, None))
    if not grad.is_cuda or not unseen(grad, *kept):
        return None
    key = like(grad), *map(like, kept), dtype
    if (again := BACKWARD.find(key)) is None:
        if (run := prepare_backward(grad, for_dx, for_dw, dtype)) is None:
            return None
        again = BACKWARD.keep(key, run, grad.get_device())
    made: tuple[Tensor | None, Tensor | None] = again(grad, for_dx, for_dw)
    return made


def _quantizer(x: Tensor, block: tuple[int, int], both_ways: bool) -> Run | None:
    """x's codes and scales, and with both_ways its transpose's, as a function of matrices like x."""
    rule, turned = check_input("quantize_fp8_both_ways", x, block, "exact", "auto"), block == ROW
    if not has_kernels(x.device) or not x.numel():
        return None
    if both_ways:
        return read_once(x, block, rule, turned, "auto")
    run = in_one_kernel(x, block, rule, turned, gated=False)
    return run or (lambda x: quantize(x, *block, rule, turned, "auto"))


def _product(
    a: Codes, b: Codes, b_block: tuple[int, int], dtype: torch.dtype, bias: Tensor | None = None
) -> Run | None:
    operands = *a, *b, ROW, b_block, dtype, bias, "fastest"
    check_product(*operands)
    return chosen(*operands, False)


def prepare_forward(x: Tensor, weight: Tensor, bias: Tensor | None, wants_dx: bool, wants_dw: bool) -> Run | None:
    """`forward` of operands like these, as a function of them. They are quantized to choose their product, too."""
    quantize_x, quantize_w = _quantizer(x, ROW, wants_dw), _quantizer(weight, SQUARE, wants_dx)
    if not quantize_x or not quantize_w:
        return None
    multiply = _product(quantize_x(x)[:2], quantize_w(weight)[:2], SQUARE, x.dtype, bias)
    if not multiply:
        return None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Codes | None, Codes | None]:
        q, scale, *x_t = quantize_x(x)
        w, w_scale, *w_t = quantize_w(weight)
        return multiply(q, scale, w, w_scale, bias, None), w_t or None, x_t or None

    return run


def prepare_backward(grad: Tensor, for_dx: Codes | None, for_dw: Codes | None, dtype: torch.dtype) -> Run | None:
    """`backward` of such gradients and codes, as a function of them."""
    if not (quantize_g := _quantizer(grad, ROW, both_ways=for_dw is not None)):
        return None
    columns, (g, scale, *g_t) = grad.shape[1], quantize_g(grad)
    to_dx = for_dx and _product((g, scale), (for_dx[0][:, :columns], for_dx[1]), SQUARE, grad.dtype)
    to_dw = for_dw and _product((g_t[0], g_t[1]), for_dw, ROW, dtype)
    if (for_dx and not to_dx) or (for_dw and not to_dw):
        return None

    def run(grad: Tensor, for_dx: Codes | None, for_dw: Codes | None) -> tuple[Tensor | None, Tensor | None]:
        g, scale, *g_t = quantize_g(grad)
        dx = dw = None
        if for_dx and to_dx:
            w_t, w_t_scale = for_dx
            dx = to_dx(g, scale, w_t if w_t.shape[1] == columns else w_t[:, :columns], w_t_scale, None, None)
        if for_dw and to_dw:
            dw = to_dw(*g_t, *for_dw, None, None)
        return dx, dw

    return run
