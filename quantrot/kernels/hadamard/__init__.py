"""The Hadamard transform over the last dimension: y = scale * (x * signs) H.

H is quantrot's Hadamard matrix of that order (`quantrot.orthogonal.hadamard`), so an online transform and a fold into
weights are the same matrix; with `block=B` it is block-diagonal, H of order B repeated. Contract of every backend:

    x       [..., n], bfloat16, float16, float32 or float64; any number of rows (0 too), any strides, any alignment
    signs   [B] or [n] of +-1, or None; multiplies the input
    scale   a finite number; by default 1 / sqrt(B), which makes the transform orthonormal
    y       x's shape and dtype, contiguous; sums in float32 (float64 for float64), rounded once to nearest even
    inf, nan reach every output of their own block and no other, as sums of +-x do; a zero's sign is not specified

Backends, on CUDA devices: "hopper" (CUDA C++, sm_90, needs cuda.core), "triton", "reference" (plain torch); "auto"
takes the first that the device and the installation have. The operators are torch.library's, `quantrot::hadamard` and
the mutating `quantrot::hadamard_`: autograd, torch.compile and CUDA graphs see one opaque function, with the same
bits in all of them. QuaRot, arXiv:2404.00456; HadaCore, arXiv:2412.08832.
"""

import os
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.hadamard.reference import hadamard_reference
from quantrot.kernels.operators import check_backend, check_device, check_signs, implement, number, refuse_tangents
from quantrot.kernels.ready import Ready, lies_well, like, unseen
from quantrot.orthogonal import hadamard_factors

READY = Ready()
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BACKENDS = ("auto", "hopper", "triton", "reference")
SCHEMA = "Tensor? signs, int order, float scale, bool transpose, str backend"

torch.library.define("quantrot::hadamard", f"(Tensor x, {SCHEMA}) -> Tensor")
torch.library.define("quantrot::hadamard_", f"(Tensor(a!) x, {SCHEMA}) -> ()")


def hadamard_transform(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """scale * (x * signs) H over the last dimension of x; a new contiguous tensor of x's shape and dtype.

    order: of H; x.shape[-1] when left out, and equal to it unless `block` is given. block: H is this order's, repeated
    along the last dimension. signs: +-1, [block or order] or [x.shape[-1]]. scale: 1 / sqrt(block or order) when left
    out. Differentiable in x; the gradient is scale * (g H^T) * signs. Raises ValueError for an order that has no known
    Hadamard matrix, a block that does not divide the last dimension, a dtype it does not support, or a backend that
    cannot run here.
    """
    key, given = None, signs
    if x.is_cuda and backend == "auto" and unseen(x, signs):
        key = like(x), like(signs), order, block, scale
        if (again := READY.find(key)) is not None:
            return again(x, signs)
    size, signs, scale = check_transform(x, order, block, signs, scale, backend)
    if key and signs is given and lies_well(signs) and _backend(x, size, backend) == "hopper":
        from quantrot.kernels.hadamard import hopper

        if run := hopper.prepare_transform(x, signs, size, scale):
            return READY.keep(key, run, x.get_device())(x, signs)
    return torch.ops.quantrot.hadamard(x, signs, size, scale, False, backend)


def hadamard_transform_(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """hadamard_transform in place: overwrites x (any strides, no element twice in memory) and returns it."""
    size, signs, scale = check_transform(x, order, block, signs, scale, backend)
    if torch.is_grad_enabled() and x.requires_grad:
        return x.copy_(torch.ops.quantrot.hadamard(x, signs, size, scale, False, backend))
    torch.ops.quantrot.hadamard_(x, signs, size, scale, False, backend)
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
    size, signs, scale = check_transform(x, order, block, signs, scale, "auto")
    return torch.ops.quantrot.hadamard(x, signs, size, scale, False, "reference")


def check_known(order: int) -> None:
    """ValueError for an order with no known matrix. In compiled code, where it may be any, the operator finds out."""
    if not torch.compiler.is_compiling():
        hadamard_factors(order)


def check_transform(
    x: Tensor, order: int | None, block: int | None, signs: Tensor | None, scale: float | None, backend: str
) -> tuple[int, Tensor | None, float]:
    """(order of the repeated matrix, signs as int8, scale), or ValueError."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}; convert it first")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: shape {tuple(x.shape)} has no last dimension to transform; give it at least one column")
    check_backend(backend, BACKENDS)
    width = x.shape[-1]
    if block is not None and (block < 1 or width % block):
        raise ValueError(f"block: {block} does not divide the last dimension {width}; give a divisor of it")
    size = width if block is None else block
    if order is not None and order != size:
        raise ValueError(
            f"order: {order} is not the transformed width {size}; leave it out, or give `block={order}` to transform "
            "blocks of that width"
        )
    check_known(size)
    refuse_tangents(x)
    if signs is not None:
        if signs.dim() != 1 or signs.numel() not in (size, width):
            allowed = f"[{size}]" if size == width else f"[{size}] or [{width}]"
            raise ValueError(f"signs: shape {tuple(signs.shape)}; allowed: {allowed}, one +-1 a column")
        check_signs(signs)
        check_device(x=x, signs=signs)
        signs = signs.to(torch.int8)
    return size, signs, size**-0.5 if scale is None else number("scale", scale)


# --- Backends --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _best(device: torch.device) -> str:
    """What "auto" means on this CUDA device; says so once where it is not the fastest."""
    if nvrtc.available(device):
        return "hopper"
    hopper_here = torch.cuda.get_device_capability(device) == (9, 0)
    try:
        import quantrot.kernels.hadamard.triton  # noqa: F401
    except ImportError:
        warnings.warn("hadamard_transform: no Triton, so it runs as plain torch; `pip install triton`", stacklevel=2)
        return "reference"
    if hopper_here:
        warnings.warn(
            "hadamard_transform: no cuda.core, so it runs in Triton; `pip install quantrot[gpu]`", stacklevel=2
        )
    return "triton"


def _backend(x: Tensor, order: int, asked: str) -> str:
    """The backend that runs, or ValueError where the one that was asked for cannot."""
    plain = x.dtype == torch.float64 or order == 1
    if asked == "auto":
        if plain or x.device.type != "cuda":
            return "reference"
        best = _best(x.device)
        return best if best != "triton" or _triton_axes(order) else "reference"
    if asked != "reference" and plain:
        raise ValueError(f"backend: {asked!r} has no float64 and no order 1; allowed here: auto, reference")
    if asked == "hopper":
        if x.device.type != "cuda" or not nvrtc.available(x.device):
            raise ValueError(
                f"backend: 'hopper' needs a CUDA device of capability 9.0 and cuda.core, x is on {x.device}"
            )
    if asked == "triton":
        if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend: 'triton' needs a CUDA device, x is on {x.device}; allowed here: auto, reference"
            )
        if _triton_axes(order) is None:
            raise ValueError(f"backend: 'triton' has no order {order}; allowed here: auto, hopper, reference")
    return asked


def _triton_axes(order: int) -> tuple[int, int, int] | None:
    from quantrot.kernels.hadamard import triton

    return triton.axes(order)


def _run(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, backend: str) -> Tensor:
    backend = _backend(x, order, backend)
    if backend == "hopper":
        from quantrot.kernels.hadamard import hopper

        return hopper.transform(x, signs, order, scale, transpose)
    if backend == "triton":
        from quantrot.kernels.hadamard import triton

        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            before = None if transpose or signs is None else signs.contiguous()
            triton.transform(x.contiguous().view(-1, order), y.view(-1, order), before, order, scale, transpose)
        return y.mul_(signs.repeat(x.shape[-1] // signs.numel())) if signs is not None and transpose else y
    return hadamard_reference(x, signs, order, scale, transpose)


@implement("quantrot::hadamard")
def _hadamard(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, backend: str) -> Tensor:
    return _run(x, signs, order, scale, transpose, backend)


@implement("quantrot::hadamard_")
def _hadamard_(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, backend: str) -> None:
    if _backend(x, order, backend) == "hopper":
        from quantrot.kernels.hadamard import hopper

        hopper.transform(x, signs, order, scale, transpose, into=x)
        torch.autograd.graph.increment_version(x)  # or a backward that has saved x would take what it is now
    else:
        x.copy_(_run(x, signs, order, scale, transpose, backend))


@torch.library.register_fake("quantrot::hadamard")
def _hadamard_fake(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, backend: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake("quantrot::hadamard_")
def _hadamard_fake_(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool, backend: str) -> None:
    return None


def _save_for_backward(ctx, inputs, output) -> None:
    _, ctx.signs, ctx.order, ctx.scale, ctx.transpose, ctx.backend = inputs


def _backward(ctx, grad: Tensor):
    dx = torch.ops.quantrot.hadamard(grad, ctx.signs, ctx.order, ctx.scale, not ctx.transpose, ctx.backend)
    return dx, None, None, None, None, None


torch.library.register_autograd("quantrot::hadamard", _backward, setup_context=_save_for_backward)
