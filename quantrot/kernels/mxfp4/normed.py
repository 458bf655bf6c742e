"""Many tokens through RMSNorm by a packed weight, with the norm, and an addition before it, in their quantizer."""

from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import Fp8ScaleRule, rms_norm
from quantrot.kernels.mxfp4.gemm import (
    DECODE_ROWS,
    activation_rule,
    check_operands,
    mxfp4_gemm,
    takes_batch,
)
from quantrot.kernels.mxfp4.operators import has_kernels
from quantrot.kernels.mxfp4.quantized import by_batch, by_cublas
from quantrot.kernels.mxfp4.reference import ScaleRule
from quantrot.kernels.operators import (
    check_around,
    check_bias,
    check_device,
    constant,
    implement,
    number,
    register_no_gradient,
)
from quantrot.kernels.ready import Ready, Run, like, unseen

READY = Ready()
NO_GRADIENT = "mxfp4_normed is not differentiable; use mxfp4_fused, or detach x, norm and added"

torch.library.define(
    "quantrot::mxfp4_normed",
    "(Tensor x, Tensor norm, float epsilon, Tensor? added, Tensor packed, Tensor scale, str activations, str rule,"
    " int hadamard, bool settled) -> (Tensor, Tensor)",
)


def mxfp4_normed(
    x: Tensor,
    norm: Tensor,
    epsilon: float,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    added: Tensor | None = None,
    activations: str = "mxfp4",
    scale_rule: ScaleRule | Fp8ScaleRule | str | None = None,
    hadamard: int = 0,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """(mxfp4_gemm of RMSNorm of x + added, or of x; x + added), [..., N] and [..., K] in x's dtype.

    x [..., K], added the same, norm [K] of x's dtype; the sum is rounded to that, divided by sqrt(mean of its squares +
    epsilon), rounded, multiplied by norm and rounded. On Hopper more than 32 tokens of bfloat16 that are quantized
    (activations "fp8" without `hadamard`, or "mxfp4") take one kernel before the product where K is a multiple of 128
    up to 16384 and N of 16; the mean's sum, in an order of its own, may give a few numbers their neighbours. Elsewhere
    the operators run one after the other. Other arguments and errors as mxfp4_gemm's; settled speaks of norm too. Not
    differentiable.
    """
    key, operands = None, (x, norm, added, packed, scale, bias)
    if x.is_cuda and unseen(*operands):
        key = *map(like, operands), epsilon, activations, scale_rule, hadamard, settled
        if (again := READY.find(key)) is not None:
            return again(*operands)
    check_operands(x, packed, scale, activations, hadamard)
    check_bias(bias, len(packed))
    check_device(x=x, bias=bias)
    for name, given in (("norm", norm), ("added", x if added is None else added)):
        if not isinstance(given, Tensor):
            raise ValueError(f"{name}: {given!r}; allowed: a tensor of x's dtype, {x.dtype}, on {x.device}")
    check_around(x, x.shape[-1], norm, added, residual_name="added")
    epsilon = number("epsilon", epsilon, "non-negative, finite")
    rows, rest = x.reshape(-1, x.shape[-1]), None if added is None else added.reshape(-1, x.shape[-1])
    options = activations, activation_rule(activations, scale_rule), hadamard, settled
    if key and (run := _in_two_kernels(rows, norm, epsilon, rest, packed, scale, *options)):
        return READY.keep(key, _of_any_dimensions(run, x), x.get_device())(*operands)
    y, total = torch.ops.quantrot.mxfp4_normed(rows, norm, epsilon, rest, packed, scale, *options)
    y = y if bias is None else (y + bias).to(x.dtype)
    return y.view(*x.shape[:-1], len(packed)), x if added is None else total.view(x.shape)


@constant
def has_normed(n: int, k: int, device: torch.device) -> bool:
    """Whether mxfp4_normed of more than 32 quantized tokens of bfloat16 and a weight [n, k] has one kernel there before
    the product."""
    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.mxfp4 import hopper_normed

    return n > 0 and n % 16 == 0 and hopper_normed.has_columns(k)


def _of_any_dimensions(run: Run, x: Tensor) -> Run:
    """run, which takes x and added [M, K], of such as these, and of a bias."""
    lead, k = x.shape[:-1], x.shape[-1]

    def run_flat(
        x: Tensor, norm: Tensor, added: Tensor | None, packed: Tensor, scale: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flat = None if added is None else added.reshape(-1, k)
        y, total = run(packed, scale, x.reshape(-1, k), norm, flat)
        y = y if bias is None else y.add_(bias)
        return y.view(*lead, -1), x if added is None else total.view(x.shape)

    return run_flat


def _in_two_kernels(
    x: Tensor,
    norm: Tensor,
    epsilon: float,
    added: Tensor | None,
    packed: Tensor,
    scale: Tensor,
    activations: str,
    rule: str,
    hadamard: int,
    settled: bool,
) -> Run | None:
    """(The product, x + added or x) as a function of packed, scale, x, norm and added; None where Hopper has no kernel
    for them."""
    quantizes = activations == "mxfp4" or (activations == "fp8" and not hadamard)
    if not quantizes or len(x) <= DECODE_ROWS or not has_normed(len(packed), x.shape[1], x.device):
        return None
    from quantrot.kernels.mxfp4 import hopper, hopper_normed

    if not hopper_normed.fits(x, norm, added):
        return None
    batches = takes_batch(x, packed, activations, "auto")
    turn = hopper.turn_of(activations, rule, hadamard)
    assert turn is not None
    quantize = hopper_normed.prepare(x, epsilon, turn, added is not None, arranged=batches, settled=settled)
    return by_batch(quantize, len(x), packed, scale, x.dtype, settled) if batches else by_cublas(quantize, x.dtype)


@implement("quantrot::mxfp4_normed")
def _normed(
    x: Tensor, norm: Tensor, epsilon: float, added: Tensor | None, packed: Tensor, scale: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    if run := _in_two_kernels(x, norm, epsilon, added, packed, scale, *options):
        y, total = run(packed, scale, x, norm, added)
    else:
        total = x if added is None else (x + added).contiguous()
        activations, rule, hadamard, settled = options
        asked = {"activations": activations, "scale_rule": None if activations == "none" else rule}
        y = mxfp4_gemm(rms_norm(total, norm, epsilon), packed, scale, hadamard=hadamard, settled=settled, **asked)
    return y, x.new_empty(0) if added is None else total  # an operator returns no argument


@torch.library.register_fake("quantrot::mxfp4_normed")
def _normed_fake(x, norm, epsilon, added, packed, scale, activations, rule, hadamard, settled):
    total = x.new_empty(0) if added is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((x.shape[0], packed.shape[0])), total


register_no_gradient("quantrot::mxfp4_normed", NO_GRADIENT)
