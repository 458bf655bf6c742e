"""The Hadamard transform over the last dimension: y = scale * (x * signs) H.

H is quantrot's Hadamard matrix of that order (`quantrot.orthogonal.hadamard`), so an online transform and a fold into
weights are the same matrix; with `block=B` it is block-diagonal, H of order B repeated. Contract of every backend:

    x       [..., n], bfloat16, float16, float32 or float64; any number of rows (0 too), any strides, any alignment
    signs   [B] or [n] of +-1, or None; multiplies the input
    scale   a float; by default 1 / sqrt(B), which makes the transform orthonormal
    y       x's shape and dtype, contiguous; sums in float32 (float64 for float64), rounded once to nearest even
    inf, nan reach every output of their own block and no other, as sums of +-x do; a zero's sign is not specified

The operators are torch.library's (`quantrot::hadamard`, and the mutating `quantrot::hadamard_`): autograd, torch.compile and
CUDA graphs see one opaque function. QuaRot, arXiv:2404.00456; HadaCore, arXiv:2412.08832.
"""

import torch
from torch import Tensor

from quantrot.kernels.hadamard.reference import hadamard_reference
from quantrot.orthogonal import hadamard_factors

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCHEMA = "Tensor? signs, int order, float scale, bool transpose"

torch.library.define("quantrot::hadamard", f"(Tensor x, {SCHEMA}) -> Tensor")
torch.library.define("quantrot::hadamard_", f"(Tensor(a!) x, {SCHEMA}) -> ()")


def hadamard_transform(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """scale * (x * signs) H over the last dimension of x; a new contiguous tensor of x's shape and dtype.

    order: of H; x.shape[-1] when left out, and equal to it unless `block` is given. block: H is this order's, repeated
    along the last dimension. signs: +-1, [block or order] or [x.shape[-1]]. scale: 1 / sqrt(block or order) when left
    out. Differentiable in x; the gradient is scale * (g H^T) * signs. Raises ValueError for an order that has no known
    Hadamard matrix, a block that does not divide the last dimension, or a dtype it does not support.
    """
    size, signs, scale = _check(x, order, block, signs, scale)
    return torch.ops.quantrot.hadamard(x, signs, size, scale, False)


def hadamard_transform_(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """hadamard_transform in place: overwrites x (any strides, no element twice in memory) and returns it."""
    size, signs, scale = _check(x, order, block, signs, scale)
    if torch.is_grad_enabled() and x.requires_grad:
        return x.copy_(torch.ops.quantrot.hadamard(x, signs, size, scale, False))
    torch.ops.quantrot.hadamard_(x, signs, size, scale, False)
    return x


def hadamard_ref(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition of hadamard_transform, in plain torch on any device: same arguments, same errors."""
    size, signs, scale = _check(x, order, block, signs, scale)
    return hadamard_reference(x, signs, size, scale)


def _check(
    x: Tensor, order: int | None, block: int | None, signs: Tensor | None, scale: float | None
) -> tuple[int, Tensor | None, float]:
    """(order of the repeated matrix, signs as int8, scale), or ValueError."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}; convert it first")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: shape {tuple(x.shape)} has no last dimension to transform; give it at least one column")
    width = x.shape[-1]
    if order is not None and order != (width if block is None else block):
        raise ValueError(
            f"order: {order} is not the transformed width {width if block is None else block}; leave it out, or give "
            f"`block={order}` to transform blocks of that width"
        )
    if block is not None and (block < 1 or width % block):
        raise ValueError(f"block: {block} does not divide the last dimension {width}; give a divisor of it")
    size = width if block is None else block
    hadamard_factors(size)  # raises for an order with no known matrix
    if signs is not None:
        if signs.dim() != 1 or signs.numel() not in (size, width):
            allowed = f"[{size}]" if size == width else f"[{size}] or [{width}]"
            raise ValueError(f"signs: shape {tuple(signs.shape)}; allowed: {allowed}, one +-1 a column")
        if signs.device != x.device:
            raise ValueError(f"signs: on {signs.device}, x on {x.device}; move them to the same device")
        signs = signs.to(torch.int8)
    return size, signs, size**-0.5 if scale is None else float(scale)


@torch.library.impl("quantrot::hadamard", "CPU")
def _hadamard_cpu(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> Tensor:
    return hadamard_reference(x, signs, order, scale, transpose)


@torch.library.impl("quantrot::hadamard_", "CPU")
def _hadamard_cpu_(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> None:
    x.copy_(hadamard_reference(x, signs, order, scale, transpose))


@torch.library.register_fake("quantrot::hadamard")
def _hadamard_fake(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake("quantrot::hadamard_")
def _hadamard_fake_(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> None:
    return None


def _save_for_backward(ctx, inputs, output) -> None:
    _, ctx.signs, ctx.order, ctx.scale, ctx.transpose = inputs


def _backward(ctx, grad: Tensor):
    return torch.ops.quantrot.hadamard(grad, ctx.signs, ctx.order, ctx.scale, not ctx.transpose), None, None, None, None


torch.library.register_autograd("quantrot::hadamard", _backward, setup_context=_save_for_backward)
