"""Few tokens by a packed weight, with what a decoder layer has before and behind the product."""

import math
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import Fp8ScaleRule, gate, rms_norm
from quantrot.kernels.mxfp4.gemm import (
    DECODE_ROWS,
    activation_rule,
    check_operands,
    few_is_faster,
    inner_of,
    mxfp4_gemm,
    prepare,
    quantizes_gated,
)
from quantrot.kernels.mxfp4.operators import has_kernels
from quantrot.kernels.mxfp4.reference import ScaleRule
from quantrot.kernels.operators import check_around, constant, implement, number
from quantrot.kernels.ready import Ready, Run, lies_well, like, unseen

READY = Ready()

# Microseconds by which a norm or a gate, and an addition, each in a kernel of its own, are slower than with few tokens
# (H200, 16 to 32 tokens by 14 linears: the choice then takes 0.2% longer than the faster one in the mean).
FRONT, BEHIND = 0.3, 2.8

torch.library.define(
    "quantrot::mxfp4_fused",
    "(Tensor x, Tensor packed, Tensor scale, str activations, str rule, int hadamard, Tensor? norm, float epsilon,"
    " Tensor? residual, bool gated, bool settled) -> Tensor",
)


def mxfp4_fused(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    *,
    activations: str = "none",
    scale_rule: ScaleRule | Fp8ScaleRule | str | None = None,
    hadamard: int = 0,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    settled: bool = False,
) -> Tensor:
    """mxfp4_gemm of a linear in a decoder layer, with what comes before and behind it, each rounded to x's dtype.

    norm [K], of x's dtype: x is first divided by sqrt(mean(x^2) + epsilon) and multiplied by norm. gated, without norm:
    x is gate and up side by side, [..., 2 K], and silu(gate) * up is what is then turned, quantized and multiplied.
    residual, of the result's shape and dtype, is added to it.

    On Hopper one to 32 tokens of bfloat16 take one or two kernels, or up to four where a batch's product is so much
    faster. The norm's sum has an order of its own, which may give a few numbers their neighbours. Elsewhere, and where
    a gradient is wanted, it is operation by operation. Other arguments and errors as mxfp4_gemm's; settled speaks of
    norm too.
    """
    key, operands = None, (x, packed, scale, norm, residual)
    if x.is_cuda and unseen(*operands):
        key = *map(like, operands), activations, scale_rule, hadamard, epsilon, gated, settled
        if (again := READY.find(key)) is not None:
            return again(*operands)
    n, k, inner = len(packed), packed.shape[-1] * 2, inner_of(x, packed, gated, norm)
    check_operands(inner, packed, scale, activations, hadamard)
    check_around(inner, n, norm, residual)
    epsilon = number("epsilon", epsilon, "non-negative, finite")
    tokens, tensors = math.prod(x.shape[:-1]), (x, norm, residual)
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    around = norm is not None or residual is not None or gated
    if around and x.dtype == torch.bfloat16 and not grads and has_fused(tokens, n, k, x.device):
        flat = None if residual is None else residual.reshape(-1, n)
        rest = activations, activation_rule(activations, scale_rule), hadamard, norm, epsilon, flat, gated, settled
        rows = x.reshape(-1, x.shape[-1])
        if key and (run := _kernels(rows, packed, scale, *rest)):
            return READY.keep(key, _of_any_dimensions(run, x, n), x.get_device())(*operands)
        y = torch.ops.quantrot.mxfp4_fused(rows, packed, scale, *rest)
        return y.view(*x.shape[:-1], n)
    product: dict[str, Any] = {
        "activations": activations,
        "scale_rule": scale_rule,
        "hadamard": hadamard,
        "settled": settled,
    }
    return _apart(x, packed, scale, norm, epsilon, residual, gated, product)


def _apart(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gated: bool,
    product: dict[str, Any],
) -> Tensor:
    """Operation by operation."""
    x = gate(x) if gated else x if norm is None else rms_norm(x, norm, epsilon)
    y = mxfp4_gemm(x, packed, scale, **product)
    return y if residual is None else y + residual


def has_fused(tokens: int, n: int, k: int, device: torch.device) -> bool:
    """Whether mxfp4_fused of so many tokens of bfloat16 and a weight [n, k] is in one or two kernels there."""
    if tokens > 1:  # a branch: of torch.compile's numbers that are not known yet it is no constant
        return _has_fused(True, n, k, device) and tokens <= DECODE_ROWS  # which a device without kernels does not ask
    return tokens == 1 and _has_fused(False, n, k, device)


@constant
def _has_fused(several: bool, n: int, k: int, device: torch.device) -> bool:
    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.mxfp4 import hopper

    return hopper.takes(1 + several, n, k)


def batch_is_faster(tokens: int, n: int, k: int, activations: str, front: bool, behind: bool) -> bool:
    """Whether quantized tokens take a batch's product, with kernels of their own for what is in front and behind."""
    return activations != "none" and not few_is_faster(tokens, n, k, activations, FRONT * front + BEHIND * behind)


def _read_as_they_lie(x: Tensor, activations: str, hadamard: int, norm: Tensor | None, residual: Tensor | None) -> bool:
    turns = activations == "mxfp4" or not hadamard  # what is turned and not quantized to MXFP4 has a kernel of its own
    return x.is_cuda and turns and lies_well(norm) and lies_well(residual)


def _of_any_dimensions(run: Run, x: Tensor, n: int) -> Run:
    """run, which takes x [M, K] and residual [M, N], of such as these."""
    lead, width = x.shape[:-1], x.shape[-1]

    def run_flat(x: Tensor, packed: Tensor, scale: Tensor, norm: Tensor | None, residual: Tensor | None) -> Tensor:
        flat = None if residual is None else residual.reshape(-1, n)
        y: Tensor = run(x.reshape(-1, width), packed, scale, norm, flat)
        return y.view(*lead, n)

    return run_flat


def _kernels(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    activations: str,
    rule: str,
    hadamard: int,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gated: bool,
    settled: bool,
) -> Run | None:
    """All of it on Hopper, as a function of x, packed, scale, norm and residual: in the kernels for few tokens, or in
    a batch's where they are faster; None where there are none."""
    if not _read_as_they_lie(x, activations, hadamard, norm, residual):
        return None
    from quantrot.kernels.mxfp4 import hopper

    n, k, front = len(packed), packed.shape[1] * 2, gated or norm is not None
    if not batch_is_faster(len(x), n, k, activations, front, residual is not None):
        turn = hopper.turn_of(activations, rule, hadamard)
        few = hopper.prepare(x, packed, scale, x.dtype, None, turn, settled, norm, epsilon, residual, gated)
        return lambda x, packed, scale, norm, residual: few(x, None, packed, scale, norm, residual)
    first, tokens = None, x
    gated = gated and quantizes_gated(x[:, :k], packed, activations, hadamard, "auto")
    if front and not gated:
        arranging = hopper.Arranging(None, "PLAIN", "GATED" if norm is None else "NORMED")
        first = hopper.prepare_arranging(x, k, arranging, norm, epsilon, settled)
        tokens = torch.empty(len(x), k, dtype=x.dtype, device=x.device)
    product = prepare(tokens, packed, scale, activations, rule, hadamard, settled, gated=gated)
    if product is None:
        return None

    def run(x: Tensor, packed: Tensor, scale: Tensor, norm: Tensor | None, residual: Tensor | None) -> Tensor:
        y: Tensor = product(first(hopper.aligned(x), norm)[0] if first else x, packed, scale)
        return y if residual is None else y + residual

    return run


@implement("quantrot::mxfp4_fused")
def _fused(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    activations: str,
    rule: str,
    hadamard: int,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gated: bool,
    settled: bool,
) -> Tensor:
    around = norm, epsilon, residual, gated, settled
    if run := _kernels(x, packed, scale, activations, rule, hadamard, *around):
        return run(x, packed, scale, norm, residual)
    asked = None if activations == "none" else rule
    product = {"activations": activations, "scale_rule": asked, "hadamard": hadamard, "settled": settled}
    return _apart(x, packed, scale, norm, epsilon, residual, gated, product)


@torch.library.register_fake("quantrot::mxfp4_fused")
def _fused_fake(x, packed, scale, activations, rule, hadamard, norm, epsilon, residual, gated, settled):
    return x.new_empty(x.shape[0], packed.shape[0])
