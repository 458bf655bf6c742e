"""The mixed-input product: one operand in 8 bits, the other one wide; y = x W^T.

    x           [..., K] and weight [N, K]: one of them is narrow, the other bfloat16, float16, float32 or float64
    narrow      int8, uint8 or float8_e4m3fn; a weight also int32 [N, ceil(K / 4)], as `pack_int8` and the on-disk
                layout of compressed-tensors have it: a view of bytes q + 128, never repacked
    scale       [R] or [R, G], any float type, for the narrow operand's R rows: each K / G columns share one
    zero_point  as scale, int8 (uint8 for uint8 codes), or None: what is subtracted from the codes; not with e4m3
    bias        [N] or None
    y           [..., N] in the wide operand's dtype

Order of operations: codes are converted, and zero points subtracted, exactly; the products of a group of columns are
summed in float32 (float64 for float64); the sum is multiplied by the group's scale in float32 and added to the other
groups', in order; the bias is added; the result is rounded once, to nearest even. Inf and NaN of the wide operand, of
scales and of e4m3 codes go through as in those sums.

Backends, on CUDA devices: "hopper" (capability 9.0) and "triton", which widen codes on their way to the tensor cores
(bfloat16 and float16; one scale a row, or groups in multiples of 64); "expand", which writes the dequantized operand,
rounded to the wide type, and multiplies it by cuBLAS; "reference" (plain torch), which is also what a CPU runs. "auto"
is "hopper" where it can run (K a multiple of 16, N of 8). Elsewhere it is "triton", and expands where the wide operand
has so many rows that this costs little against the product, and for what "triton" does not take: any N and K are right,
K that is no multiple of 16 is read in narrower pieces. Up to 16 rows of x, on "triton", a row's bits
do not depend on the other rows.

What "expand" multiplies has been rounded once more: its error, relative to float64, is 2.35e-3 in bfloat16 and 2.9e-4
in float16, where every other backend has one rounding's, 1.66e-3 and 2.1e-4.

The operators are torch.library's, `quantrot::mixed_gemm`, `mixed_linear` and `mixed_expand`: torch.compile and CUDA
graphs see one opaque function, and so does autograd (with respect to the wide operand and the bias).
"""

import os
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.fp8.reference import gate, rms_norm
from quantrot.kernels.mixed.plans import DECODE_COLUMNS
from quantrot.kernels.mixed.reference import (
    dequantize,
    dequantize_int8,
    mixed_reference,
    pack_int8,
    quantize_int8,
    unpack_int8,
)
from quantrot.kernels.mixed.tuned import EXPAND_FROM
from quantrot.kernels.operators import (
    check_around,
    check_backend,
    check_bias,
    check_device,
    constant,
    exporting,
    has_triton,
    implement,
    number,
    refuse_tangents,
)
from quantrot.kernels.ready import Ready, Run, like, unseen

__all__ = [
    "dequantize_int8",
    "has_kernels",
    "has_fused",
    "mixed_gemm",
    "mixed_linear",
    "mixed_ref",
    "pack_int8",
    "quantize_int8",
    "unpack_int8",
]

KINDS = {torch.int8: "int8", torch.uint8: "uint8", torch.float8_e4m3fn: "e4m3", torch.int32: "packed"}
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BACKENDS = ("auto", "hopper", "triton", "expand", "reference")
GROUP_STEP = 64  # the kernels' groups are multiples of it
READY = Ready()

OPERANDS = "Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias"
torch.library.define("quantrot::mixed_gemm", f"({OPERANDS}, str backend, bool weight_ready=False) -> Tensor")
torch.library.define(
    "quantrot::mixed_linear",
    f"({OPERANDS}, Tensor? norm, float epsilon, Tensor? residual, bool gates, bool weight_ready=False) -> Tensor",
)
torch.library.define(
    "quantrot::mixed_expand",
    "(Tensor codes, Tensor scale, Tensor? zero_point, int columns, ScalarType dtype) -> Tensor",
)


def mixed_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
    weight_ready: bool = False,
) -> Tensor:
    """x [..., K] times the transpose of weight [N, K], one of them narrow: [..., N] in the wide one's dtype.

    Which is narrow, the dtypes say; scale and zero_point belong to it (activations count as [M, K], leading dimensions
    flattened). Any strides. Differentiable in the wide operand and the bias; where scale or e4m3 codes require a
    gradient, a backward raises NotImplementedError. The contract is at the top of the file.
    weight_ready: nothing that still runs on the device writes weight, scale, zero_point or bias, as with a module's
    parameters: then, for a few tokens, reading them begins before the kernel before this one has ended.
    Raises ValueError for shapes, dtypes or devices that do not fit, or a backend that cannot run here.
    """
    key, operands = None, (x, weight, scale, zero_point, bias, None, None)
    if x.is_cuda and backend == "auto" and unseen(*operands):
        key = *map(like, operands), 0.0, False, weight_ready
        if (again := READY.find(key)) is not None:
            return again(*operands)
    copied_scale = not scale.is_contiguous() or not (zero_point is None or zero_point.is_contiguous())
    scale, zero_point = _check(x, weight, scale, zero_point, bias, backend)
    flat, ready = x.reshape(-1, x.shape[-1]), weight_ready and not copied_scale
    rest: Any = None, 0.0, None, False, ready
    if key and not copied_scale and (run := _kernels(flat, weight, scale, zero_point, bias, *rest)):
        return READY.keep(key, _of_any_dimensions(run, x, None), x.get_device())(*operands)
    y = torch.ops.quantrot.mixed_gemm(flat, weight, scale, zero_point, bias, backend, ready)
    return y.view(*x.shape[:-1], weight.shape[0])


def mixed_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gates: bool = False,
    weight_ready: bool = False,
) -> Tensor:
    """mixed_gemm of a linear in a decoder layer, with what comes before and behind it, each rounded to x's dtype.

    norm [K], of x's dtype: x is first divided by sqrt(mean(x^2) + epsilon) and multiplied by norm. gates: the product
    is gate and up side by side, and the result is silu(gate) * up, [..., N / 2]; silu is computed in float32. residual,
    of the result's shape and dtype, is added to it; not with gates.

    On Hopper one kernel does all of it for one token, and for up to 16 all but the norm, which is a kernel in front:
    silu to 2 ulp of float32, and the sum of the norm in an order of its own, which may give a few numbers their
    neighbours in x's dtype. Otherwise, and where a gradient is wanted, operation by operation; for more rows
    torch.compile fuses those. Other arguments and errors as mixed_gemm's; weight_ready speaks of norm too.
    """
    key, operands = None, (x, weight, scale, zero_point, bias, norm, residual)
    if x.is_cuda and unseen(*operands):
        key = *map(like, operands), epsilon, gates, weight_ready
        if (again := READY.find(key)) is not None:
            return again(*operands)
    _check_matrices(x, weight)
    if gates and (weight.shape[0] % 2 or residual is not None):
        raise ValueError(f"gates: weight {_shape(weight)}; it takes an even number of rows, gate over up, no residual")
    if norm is not None and x.dtype not in WIDE:
        raise ValueError(f"norm: x is {x.dtype}; it takes x of {', '.join(map(str, WIDE))}")
    check_around(x, weight.shape[0], norm, residual, x.dtype if x.dtype in WIDE else weight.dtype)
    epsilon = number("epsilon", epsilon, "non-negative, finite")
    tensors = x, weight, scale, bias, norm, residual
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    few = exporting() or x.numel() <= DECODE_COLUMNS * x.shape[-1]  # the operator takes any number
    copied_scale = not scale.is_contiguous() or not (zero_point is None or zero_point.is_contiguous())
    if key and not copied_scale and len(weight):
        held = weight, *_check(x, weight, scale, zero_point, bias, "auto"), bias
        rows = None if residual is None else residual.reshape(-1, weight.shape[0])
        if run := _kernels(x.reshape(-1, x.shape[-1]), *held, norm, epsilon, rows, gates, weight_ready):
            return READY.keep(key, _of_any_dimensions(run, x, residual), x.get_device())(*operands)
    if grads or x.dtype not in WIDE or not few:
        x = x if norm is None else rms_norm(x, norm, epsilon)
        y = mixed_gemm(x, weight, scale, zero_point, bias, weight_ready=weight_ready)
        return gate(y) if gates else y if residual is None else y + residual
    scale, zero_point = _check(x, weight, scale, zero_point, bias, "auto")
    flat, ready = x.reshape(-1, x.shape[-1]), weight_ready and not copied_scale
    rest = norm, epsilon, None if residual is None else residual.reshape(-1, weight.shape[0]), gates, ready
    y = torch.ops.quantrot.mixed_linear(flat, weight, scale, zero_point, bias, *rest)
    return y.view(*x.shape[:-1], y.shape[1])


def mixed_ref(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The definition of mixed_gemm, in plain torch on any device: same arguments, same errors."""
    scale, zero_point = _check(x, weight, scale, zero_point, bias, "auto")
    y = mixed_reference(x.reshape(-1, x.shape[-1]), weight, scale, zero_point, bias, x.dtype in WIDE)
    return y.view(*x.shape[:-1], weight.shape[0])


@constant
def has_kernels(device: torch.device) -> bool:
    """Whether products on this device run from the codes, without a wide copy of the weight kept beside them."""
    return device.type == "cuda" and has_triton()


def has_fused(tokens: int, n: int, k: int, groups: int, device: torch.device) -> bool:
    """Whether mixed_linear of so many tokens of 16 bits and a weight [n, k], groups scales a row, is in one or two
    kernels there with all that it takes."""
    if not _has_fused(n, k, groups, device):
        return False
    return bool(0 < tokens <= DECODE_COLUMNS)  # a branch: of torch.compile's numbers that are not known yet


@constant
def _has_fused(n: int, k: int, groups: int, device: torch.device) -> bool:
    from quantrot.kernels import nvrtc

    if not has_kernels(device) or not nvrtc.available(device):
        return False
    from quantrot.kernels.mixed import hopper

    return hopper.takes_around(n, k, groups)


def _shape(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}".removeprefix("torch.")


def _check(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """(scale, zero_point) as [R, G], or ValueError."""
    check_backend(backend, BACKENDS)
    _check_matrices(x, weight)
    narrow_weight = x.dtype in WIDE
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    if wide.dtype not in WIDE or codes.dtype not in KINDS or (codes.dtype == torch.int32 and not narrow_weight):
        raise ValueError(
            f"x: {_shape(x)}, weight: {_shape(weight)}; allowed: one of them int8, uint8 or float8_e4m3fn (a weight "
            "also packed int32), the other bfloat16, float16, float32 or float64; convert one"
        )
    columns = wide.shape[-1]
    expected = -(-columns // 4) if codes.dtype == torch.int32 else columns
    if codes.shape[-1] != expected:
        raise ValueError(
            f"weight: {_shape(weight)} does not go with x: {_shape(x)}; allowed: as many columns in both (packed "
            "int32: a quarter of them); check which weight this is"
        )
    rows = codes.shape[0] if narrow_weight else x.numel() // max(columns, 1)
    scale = _per_group("scale", scale, rows, columns)
    if not scale.is_floating_point():
        raise ValueError(f"scale: {_shape(scale)}; allowed: a float type; convert it")
    if zero_point is not None:
        wanted = {torch.uint8: torch.uint8, torch.float8_e4m3fn: None}.get(codes.dtype, torch.int8)
        if zero_point.dtype != wanted:
            raise ValueError(
                f"zero_point: {_shape(zero_point)} with {codes.dtype} codes; allowed: {wanted or 'None, e4m3 has none'}"
            )
        zero_point = _per_group("zero_point", zero_point, rows, columns)
        if zero_point.shape != scale.shape:
            raise ValueError(f"zero_point: {_shape(zero_point)}; allowed: scale's shape, {list(scale.shape)}")
    check_bias(bias, weight.shape[0])
    check_device(x=x, weight=weight, scale=scale, zero_point=zero_point, bias=bias)
    refuse_tangents(x, scale, zero_point, bias)
    return scale, zero_point


def _check_matrices(x: Tensor, weight: Tensor) -> None:
    if x.dim() < 1 or weight.dim() != 2 or not x.shape[-1]:
        raise ValueError(
            f"x: {_shape(x)}, weight: {_shape(weight)}; allowed: [..., K] and [N, K], K >= 1; reshape them"
        )


def _per_group(name: str, t: Tensor, rows: int, columns: int) -> Tensor:
    t = t.unsqueeze(-1) if t.dim() == 1 else t
    if t.dim() != 2 or t.shape[0] != rows or not t.shape[1] or columns % t.shape[1]:
        raise ValueError(
            f"{name}: shape {list(t.shape)}; allowed: [{rows}] or [{rows}, G] with G a divisor of the {columns} columns"
        )
    return t.contiguous()


# --- Backends --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _no_triton() -> bool:
    """Whether Triton is missing; says so once."""
    if not has_triton():
        warnings.warn("mixed_gemm: no Triton, so weights are expanded in torch; `pip install triton`", stacklevel=2)
    return not has_triton()


def _is_hopper(t: Tensor) -> bool:
    return torch.cuda.get_device_capability(t.device) == (9, 0)


def _hopper(codes: Tensor, wide: Tensor, scale: Tensor, narrow_weight: bool) -> str | None:
    """Why the kernels for Hopper do not take this product on its device, or None."""
    from quantrot.kernels import nvrtc

    if not wide.is_cuda or not has_triton() or not nvrtc.available(wide.device):
        return f"needs an NVIDIA GPU of capability 9.0, cuda.core and Triton; x is on {wide.device}"
    from quantrot.kernels.mixed import hopper

    return hopper.unsupported(codes, wide, scale, narrow_weight)


def _backend(codes: Tensor, wide: Tensor, scale: Tensor, narrow_weight: bool, asked: str) -> str:
    """The backend that runs, or ValueError where the one that was asked for cannot."""
    groups = scale.shape[1]
    fits = groups == 1 or wide.shape[1] // groups % GROUP_STEP == 0
    kernel_has_it = fits and wide.dtype in (torch.bfloat16, torch.float16)
    if asked == "auto":
        if not wide.is_cuda or wide.dtype == torch.float64:
            return "reference"
        if not _no_triton() and _hopper(codes, wide, scale, narrow_weight) is None:
            return "hopper"
        most = DECODE_COLUMNS + 1 if _is_hopper(wide) else EXPAND_FROM["channel" if groups == 1 else "group"]
        few = wide.shape[0] < most
        return "triton" if kernel_has_it and few and not _no_triton() else "expand"
    if asked == "hopper" and (reason := _hopper(codes, wide, scale, narrow_weight)):
        raise ValueError(f"backend: 'hopper': {reason}; use 'auto' for others")
    if asked == "triton" and not kernel_has_it:
        raise ValueError(
            f"backend: 'triton' has no {wide.dtype} with {groups} scales for {wide.shape[1]} columns; allowed: "
            f"bfloat16 or float16, and one scale a row or groups in multiples of {GROUP_STEP}; use 'auto' for others"
        )
    if asked == "triton" and not wide.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend: 'triton' needs a CUDA device, x is on {wide.device}; use 'auto' or 'reference'")
    return asked


def _bytes(codes: Tensor) -> Tensor:
    """The codes as uint8 [R, K] with contiguous rows' columns; packed ones with up to three columns more."""
    return (codes if codes.stride(-1) == 1 else codes.contiguous()).view(torch.uint8)


def _expand(codes: Tensor, scale: Tensor, zero_point: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (codes.is_cuda or interpreted) or dtype == torch.float64 or _no_triton():
        return dequantize(codes, scale, zero_point, columns, dtype)
    from quantrot.kernels.mixed import triton

    out = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    if out.numel():
        with torch.cuda.device_of(codes):
            triton.expand(_bytes(codes), scale, zero_point, KINDS[codes.dtype], out)
    return out


@implement("quantrot::mixed_gemm")
def _mixed_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    backend: str,
    weight_ready: bool = False,
) -> Tensor:
    narrow_weight = x.dtype in WIDE
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    backend = _backend(codes, wide, scale, narrow_weight, backend)
    if backend == "reference":
        return mixed_reference(x, weight, scale, zero_point, bias, narrow_weight)
    if backend == "expand":
        expanded = _expand(codes, scale, zero_point, wide.shape[1], wide.dtype)
        as_wide = None if bias is None else bias.to(wide.dtype)
        return F.linear(x, expanded, as_wide) if narrow_weight else F.linear(expanded, weight, as_wide)
    if backend == "hopper":
        from quantrot.kernels.mixed import hopper

        left, right = (x, _bytes(codes)) if narrow_weight else (_bytes(codes), weight)
        ready, kind = weight_ready and right.data_ptr() == weight.data_ptr(), KINDS[codes.dtype]
        return hopper.multiply(left, right, scale, zero_point, bias, kind, narrow_weight, ready=ready)
    from quantrot.kernels.mixed import triton

    wide = wide if wide.stride(-1) == 1 else wide.contiguous()
    left, right = (wide, _bytes(codes)) if narrow_weight else (_bytes(codes), wide)
    with torch.cuda.device_of(x):
        return triton.multiply(left, right, scale, zero_point, bias, KINDS[codes.dtype], narrow_weight)


def _of_any_dimensions(run: Run, x: Tensor, residual: Tensor | None) -> Run:
    """run, which takes x [M, K] and residual [M, N], of such as these."""
    if x.dim() == 2:
        return run
    lead, k, n = x.shape[:-1], x.shape[-1], 0 if residual is None else residual.shape[-1]

    def run_flat(x: Tensor, *operands: Any) -> Tensor:
        *held, residual = operands
        y: Tensor = run(x.reshape(-1, k), *held, None if residual is None else residual.reshape(-1, n))
        return y.view(*lead, y.shape[1])

    return run_flat


def _kernels(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gates: bool,
    weight_ready: bool,
) -> Run | None:
    """mixed_linear of an x [M, K] on Hopper, as a function of x, weight, scale, zero_point, bias, norm and residual:
    what is around the product in its kernel, or operations behind it. None elsewhere, and of a norm that is neither."""
    if x.dtype not in WIDE or not x.shape[0] * len(weight):
        return None
    if _backend(weight, x, scale, True, "auto") != "hopper":
        return None
    from quantrot.kernels.mixed import hopper

    around = gates or norm is not None or residual is not None
    fits = (not gates or weight.shape[0] % 16 == 0) and x.shape[0] <= DECODE_COLUMNS
    inside = around and fits and hopper.takes(x, weight.shape[0], scale.shape[1], norm, residual)
    if norm is not None and not inside:
        return None
    codes = _bytes(weight)
    ready = weight_ready and codes.data_ptr() == weight.data_ptr()
    rest = (gates, norm, epsilon, residual) if inside else ()
    product = hopper.prepare(x, codes, scale, zero_point, bias, KINDS[weight.dtype], True, None, ready, *rest)

    def run(x: Tensor, weight: Tensor, *operands: Tensor | None) -> Tensor:
        *held, residual = operands
        if inside:
            return product(x, _bytes(weight), *held, residual)
        y: Tensor = product(x, _bytes(weight), *held, None)
        return gate(y) if gates else y if residual is None else y + residual

    return run


@implement("quantrot::mixed_linear")
def _mixed_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gates: bool,
    weight_ready: bool = False,
) -> Tensor:
    operands, behind = (weight, scale, zero_point, bias), (residual, gates, weight_ready)
    run = _kernels(x, *operands, norm, epsilon, *behind)
    if run is None and norm is not None:
        x, norm = rms_norm(x, norm, epsilon), None
        run = _kernels(x, *operands, norm, epsilon, *behind)
    if run is not None:
        return run(x, *operands, norm, residual)
    y = _mixed_gemm(x, *operands, "auto", weight_ready)
    return gate(y) if gates else y if residual is None else y + residual


@torch.library.register_fake("quantrot::mixed_linear")
def _mixed_linear_fake(x, weight, scale, zero_point, bias, norm, epsilon, residual, gates, weight_ready=False):
    return x.new_empty(x.shape[0], weight.shape[0] // (1 + gates))


@torch.library.register_fake("quantrot::mixed_gemm")
def _mixed_gemm_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    backend: str,
    weight_ready: bool = False,
) -> Tensor:
    return (x if x.dtype in WIDE else weight).new_empty(x.shape[0], weight.shape[0])


@implement("quantrot::mixed_expand")
def _mixed_expand(codes: Tensor, scale: Tensor, zero_point: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    return _expand(codes, scale, zero_point, columns, dtype)


@torch.library.register_fake("quantrot::mixed_expand")
def _mixed_expand_fake(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    return scale.new_empty(codes.shape[0], columns, dtype=dtype)


NO_GRADIENT = (
    "mixed_gemm: scale and codes have no gradient; detach them (requires_grad_(False) of parameters), or train the "
    "dequantized weight"
)


def _save_for_backward(ctx, inputs, output) -> None:
    x, weight, scale, zero_point, bias, *_ = inputs
    ctx.narrow_weight = x.dtype in WIDE
    ctx.columns = (x if ctx.narrow_weight else weight).shape[1]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight if ctx.narrow_weight else x, scale, zero_point)


def _backward(ctx, grad: Tensor):
    codes, scale, zero_point = ctx.saved_tensors
    wide, narrow = (0, 1) if ctx.narrow_weight else (1, 0)
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for i, t in ((narrow, codes), (2, scale)):
        if ctx.needs_input_grad[i]:
            grads[i] = torch.ops.quantrot.no_gradient(grad, t.shape, NO_GRADIENT)
    if ctx.needs_input_grad[wide]:
        expanded = torch.ops.quantrot.mixed_expand(codes, scale, zero_point, ctx.columns, grad.dtype)
        grads[wide] = (grad if ctx.narrow_weight else grad.T) @ expanded
    if ctx.needs_input_grad[4]:
        grads[4] = grad.sum(0, dtype=torch.float32 if grad.dtype != torch.float64 else None).to(ctx.bias_dtype)
    return tuple(grads)


torch.library.register_autograd("quantrot::mixed_gemm", _backward, setup_context=_save_for_backward)
