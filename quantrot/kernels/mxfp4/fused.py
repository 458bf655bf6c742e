"""One token by a packed weight, with what a decoder layer has before and behind the product."""

from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import Fp8ScaleRule, gate, rms_norm
from quantrot.kernels.mxfp4.gemm import activation_rule, check_operands, mxfp4_gemm
from quantrot.kernels.mxfp4.operators import has_kernels
from quantrot.kernels.mxfp4.reference import ScaleRule
from quantrot.kernels.operators import check_around, constant, implement

torch.library.define(
    "quantrot::mxfp4_fused",
    "(Tensor x, Tensor packed, Tensor scale, str activations, str rule, int hadamard, Tensor? norm, float epsilon,"
    " Tensor? residual, bool settled) -> Tensor",
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
    gates: bool = False,
    settled: bool = False,
) -> Tensor:
    """mxfp4_gemm of a linear in a decoder layer, with what comes before and behind it, each rounded to x's dtype.

    norm [K], of x's dtype: x is first divided by sqrt(mean(x^2) + epsilon) and multiplied by norm; then it is turned
    and quantized. residual, of the result's shape and dtype, is added to it. gates, without residual: the product is
    gate and up side by side, and the result silu(gate) * up, [..., N / 2], by operations of their own.

    On Hopper norm and residual are in the product's kernel for one token of bfloat16; the norm's sum has an order of
    its own, which may give a few numbers their neighbours. Elsewhere, and where a gradient is wanted, it is operation
    by operation. Other arguments and errors as mxfp4_gemm's; settled speaks of norm too.
    """
    check_operands(x, packed, scale, activations, hadamard)
    if gates and (residual is not None or len(packed) % 2):
        raise ValueError(f"gates: packed {tuple(packed.shape)}; it takes an even number of rows, and no residual")
    check_around(x, len(packed), norm, residual)
    product: dict[str, Any] = {
        "activations": activations,
        "scale_rule": scale_rule,
        "hadamard": hadamard,
        "settled": settled,
    }
    tensors = x, norm, residual
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    one = x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and not grads
    if one and (norm is not None or residual is not None) and has_one_kernel(len(packed), x.shape[-1], x.device):
        flat = None if residual is None else residual.reshape(1, -1)
        rest = activations, activation_rule(activations, scale_rule), hadamard, norm, epsilon, flat, settled
        y = torch.ops.quantrot.mxfp4_fused(x.reshape(1, -1), packed, scale, *rest).view(*x.shape[:-1], len(packed))
    else:
        y = mxfp4_gemm(x if norm is None else rms_norm(x, norm, epsilon), packed, scale, **product)
        y = y if residual is None else y + residual
    return gate(y) if gates else y


@constant
def has_one_kernel(n: int, k: int, device: torch.device) -> bool:
    """Whether mxfp4_fused of one token of bfloat16 and a weight [n, k] is one kernel there, but for a gate."""
    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.mxfp4 import hopper

    return hopper.takes_one(n, k)


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
    settled: bool,
) -> Tensor:
    beside = [t for t in (norm, residual) if t is not None]
    turns = activations == "mxfp4" or not hadamard  # what is turned and not quantized to MXFP4 has a kernel of its own
    if x.is_cuda and turns and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in beside):
        from quantrot.kernels.mxfp4 import hopper

        kinds: dict[str, Any] = {"mxfp4": ScaleRule, "fp8": Fp8ScaleRule}
        turn = hopper.Turn(kinds[activations](rule), hadamard) if activations in kinds else None
        rest: dict[str, Any] = {"norm": norm, "epsilon": epsilon, "residual": residual, "settled": settled}
        return hopper.decode(x, None, packed, scale, x.dtype, turn=turn, **rest)
    x = x if norm is None else rms_norm(x, norm, epsilon)
    y = mxfp4_gemm(x, packed, scale, activations=activations, scale_rule=rule, hadamard=hadamard, settled=settled)
    return y if residual is None else y + residual


@torch.library.register_fake("quantrot::mxfp4_fused")
def _fused_fake(x, packed, scale, activations, rule, hadamard, norm, epsilon, residual, settled):
    return x.new_empty(1, packed.shape[0])
