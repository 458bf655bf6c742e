"""FP8 (e4m3fn) with float32 scales on two-dimensional blocks: quantization, and the product of two quantized matrices.

    quantize_fp8_block       x [M, K] float -> qdata e4m3 [M, K], scale float32 [ceil(M / bm), ceil(K / bn)]
    hadamard_quantize_fp8    the same of x turned by an online Hadamard, in one kernel
    quantize_fp8_both_ways   x and its transpose, in one read: what training multiplies
    dequantize_fp8_block     qdata, scale   -> [M, K] float
    fp8_block_gemm           a [M, K] by the transpose of b [N, K], both quantized -> [M, N]
    fp8_linear               x [M, K] quantized in 1 x 128 blocks, by the transpose of b [N, K], quantized -> [M, N]

x ~= qdata * scale, the scale of a block being amax / 448. Division, rounding (to nearest, ties to even) and saturation
at +-448 are float32's; ragged edge blocks use the elements that exist. An all-zero block gets scale 1; -0 keeps its
sign; scales are at least 2^-126. A NaN makes its block's scale NaN, an infinity infinite, and all codes of such a block
are NaN (0x7F): it dequantizes to NaN. Codes and scales of every backend are the same bits.

`gated`: x is [M, 2 K], the gate and up projections of an MLP, and what is quantized is silu(gate) * up in x's dtype.

A block dimension of 0 means the whole dimension: (1, 0) is one scale a row (per channel, per token), (0, 0) per tensor.

A row's codes and scales depend on no other row while a block has one row. Products: "hopper" and "triton", of which
"auto" takes the first that applies, sum K in the same order for any M, so a row alone has the bits that it has in a
batch; "cublas" chooses its kernel by M and promises no such thing. "fastest" takes it where "hopper" does not apply.

The operators are torch.library's, `quantrot::...`: torch.compile and CUDA graphs see opaque functions. Sources:
GridQuant's 2D-block scheme; DeepSeek-V3, arXiv:2412.19437, section 3.3 (1 x 128 by 128 x 128); QuaRot,
arXiv:2404.00456 (the Hadamard).
"""

import importlib
import os
import warnings
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from quantrot.kernels.fp8.reference import (
    E4M3,
    E4M3_MAX,
    Fp8ScaleRule,
    both_ways_reference,
    dequantize_fp8_block,
    gate,
    gemm_reference,
    hadamard_quantize_reference,
    quantize_reference,
    rms_norm,
    scale_shape,
    whole,
)
from quantrot.kernels.hadamard import check_transform
from quantrot.kernels.operators import (
    check_around,
    check_device,
    constant,
    implement,
    register_no_gradient,
    shared_bytes,
)

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "Fp8ScaleRule",
    "dequantize_fp8_block",
    "fp8_block_gemm",
    "fp8_linear",
    "hadamard_quantize_fp8",
    "has_kernels",
    "has_one_kernel",
    "quantize_fp8_block",
    "quantize_fp8_both_ways",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_RULES = tuple(rule.value for rule in Fp8ScaleRule)  # Dynamo of torch 2.11 cannot iterate over an Enum
QUANTIZERS = ("auto", "triton", "reference")
GEMMS = {  # each module has supports(...) and gemm(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias)
    "cublas": "quantrot.kernels.fp8.cublas",
    "triton": "quantrot.kernels.fp8.triton_gemm",
    "triton_splitk": "quantrot.kernels.fp8.triton_splitk",
    "hopper": "quantrot.kernels.fp8.hopper",
}
CHOICES = {  # the first that applies; those of "auto" give a row the same bits in any batch
    "auto": ("hopper", "triton"),
    "fastest": ("hopper", "cublas", "triton"),
}

torch.library.define(
    "quantrot::quantize_fp8_block",
    "(Tensor x, int rows, int columns, str rule, bool transposed_scale, str backend, bool gated=False) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "quantrot::hadamard_quantize_fp8",
    "(Tensor x, Tensor? signs, int order, float factor, int rows, int columns, str rule, bool transposed_scale, "
    "str backend) -> (Tensor, Tensor)",
)
torch.library.define(
    "quantrot::quantize_fp8_both_ways",
    "(Tensor x, int rows, int columns, str rule, bool transposed_scale, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "quantrot::fp8_block_gemm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, int[] b_block, ScalarType out_dtype, "
    "Tensor? bias, str backend, bool b_settled=False) -> Tensor",
)
torch.library.define(
    "quantrot::fp8_linear",
    "(Tensor x, Tensor b, Tensor b_scale, int[] b_block, str rule, Tensor? bias, str backend, "
    "bool b_settled=False, Tensor? norm=None, float epsilon=0.0, Tensor? residual=None, bool gates=False) -> Tensor",
)


# --- Public ----------------------------------------------------------------------------------------------------------


def quantize_fp8_block(
    x: Tensor,
    block: tuple[int, int] = (1, 128),
    scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.bf16,
    *,
    transposed_scale: bool = False,
    gated: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Quantize [M, K] float32, float16 or bfloat16, any strides, to e4m3 with one scale a block; see the file's top.

    Returns (qdata e4m3 [M, K] contiguous, scale float32 [ceil(M / bm), ceil(K / bn)]). transposed_scale: scale is the
    transpose of a contiguous [ceil(K / bn), ceil(M / bm)], which "cublas" takes as it is. gated: x is [M, 2 K]; in
    1 x 128 blocks of 16 bits on Hopper the gate and the quantization are one kernel. Not differentiable. ValueError for
    other than two dimensions, another dtype, a negative block, an odd number of gated columns, or a backend that cannot
    run here.
    """
    rule = _check_input("quantize_fp8_block", x, block, scale_rule, backend)
    _check_gated(x, gated)
    return torch.ops.quantrot.quantize_fp8_block(x, block[0], block[1], rule, transposed_scale, backend, gated)


def hadamard_quantize_fp8(
    x: Tensor,
    *,
    order: int | None = None,
    block: int | None = None,
    signs: Tensor | None = None,
    scale: float | None = None,
    block_size: tuple[int, int] = (1, 128),
    scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.bf16,
    transposed_scale: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """quantize_fp8_block of hadamard_transform(x), x [M, K]: order, block, signs and scale are the transform's,
    block_size is the scaled block.

    The transform's float32 sums are quantized as they are. "auto" does both in one CUDA kernel on Hopper for 1 x 128
    blocks and 16-bit orders 32, 64 and multiples of 128 (where there is a kernel for them), and "triton" in one
    for many others of at most 14336; where neither can, "auto" on a GPU runs the two operators one after the other,
    with x's dtype, and one rounding to it, in between. Sums in another order differ in their last bits, so a code near
    a tie may be its neighbour: within one step of the reference's.
    """
    rule = _check_input("hadamard_quantize_fp8", x, block_size, scale_rule, backend)
    size, signs, factor = check_transform(x, order, block, signs, scale, "auto")
    rows, columns = block_size
    return torch.ops.quantrot.hadamard_quantize_fp8(
        x, signs, size, factor, rows, columns, rule, transposed_scale, backend
    )


def quantize_fp8_both_ways(
    x: Tensor,
    block: tuple[int, int] = (1, 128),
    scale_rule: Fp8ScaleRule | str = Fp8ScaleRule.exact,
    *,
    transposed_scale: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(qdata, scale) of x [M, K] and (qdata_t, scale_t) of its transpose [K, M], each in `block`, from one read of x.

    block: (1, 128), where qdata_t has other scales than qdata, along M; or (128, 128), where it is qdata turned. M is
    padded with zeros to a multiple of 128 in qdata_t, which is what multiplies K-major operands along M: a zero adds
    nothing. Otherwise as quantize_fp8_block.
    """
    if tuple(block) not in ((1, 128), (128, 128)):
        raise ValueError(f"block: {tuple(block)}; allowed: (1, 128), (128, 128)")
    rule = _check_input("quantize_fp8_both_ways", x, block, scale_rule, backend)
    return torch.ops.quantrot.quantize_fp8_both_ways(x, block[0], block[1], rule, transposed_scale, backend)


def fp8_block_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    a_block: tuple[int, int] = (1, 128),
    b_block: tuple[int, int] = (128, 128),
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    backend: str = "auto",
    b_settled: bool = False,
) -> Tensor:
    """a [M, K] times the transpose of b [N, K], both e4m3 with block scales, plus bias [N]: [M, N] in out_dtype.

    Products are added in float32 at least every 128 of K, scaled there, and the result is rounded once (bfloat16,
    float16 or float32). backend: "triton" takes blocks whose columns are a multiple of 128 or all of K, and gives a row
    the same bits whatever M is; "triton_splitk" is its variant that splits K for few rows (other bits, for a given M
    always the same ones); "cublas" takes 1 x 128 by 128 x 128 (or 1 x 128), 128 x 128 by 1 x 128, and (1, 0) by (1, 0)
    on Hopper; "hopper" is CUDA C++ for it; "reference" dequantizes; "auto" and "fastest" choose, see the file's top.
    b_settled: no kernel that may still run when this is called writes b (a weight that was loaded, not one that the
    kernels before make), so that it may be read before the kernel before this one has ended. ValueError for shapes or
    dtypes that do not fit, or a backend that cannot run.
    """
    _check_product(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, backend)
    return torch.ops.quantrot.fp8_block_gemm(
        a, a_scale, b, b_scale, list(a_block), list(b_block), out_dtype, bias, backend, b_settled
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
    rule = _check_input("fp8_linear", x, (1, 128), scale_rule, "auto")
    k = x.shape[1]
    if b.dim() != 2 or b.dtype != E4M3 or b.shape[1] != k:
        raise ValueError(f"b: {b.dtype} {tuple(b.shape)}; it must be {E4M3} (N, {k}), of x's {k} columns")
    _check_scale("b", b, b_scale, b_block)
    check_around(x, b.shape[0], norm, residual)
    if gates and (residual is not None or b.shape[0] % 2):
        raise ValueError(f"gates: b {tuple(b.shape)}; it takes an even number of rows, and no residual")
    _check_rest(b, x.dtype, bias, b_scale=b_scale, x=x)
    if backend not in ("auto", "hopper", "reference"):
        raise ValueError(f"backend: {backend!r}; allowed: auto, hopper, reference")
    rest = norm, epsilon, residual, gates
    return torch.ops.quantrot.fp8_linear(x, b, b_scale, list(b_block), rule, bias, backend, b_settled, *rest)


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_input(name: str, x: Tensor, block: tuple[int, int], rule: Fp8ScaleRule | str, backend: str) -> str:
    """The rule's name, or ValueError."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; {name} takes [M, K]: flatten leading dimensions")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}; convert it first")
    if len(block) != 2 or min(block) < 0:
        raise ValueError(f"block: {tuple(block)}; give (rows, columns), each positive, or 0 for the whole dimension")
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: {rule!r}; allowed: {', '.join(SCALE_RULES)}")
    if backend not in QUANTIZERS:
        raise ValueError(f"backend: {backend!r}; allowed: {', '.join(QUANTIZERS)}")
    return str(rule)


def _check_gated(x: Tensor, gated: bool) -> None:
    if gated and x.shape[1] % 2:
        raise ValueError(f"x: {x.shape[1]} columns; gated, it is [M, 2 K]: gate and up side by side")


def _check_product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    backend: str,
) -> None:
    for name, data in (("a", a), ("b", b)):
        if data.dim() != 2 or data.dtype != E4M3:
            raise ValueError(f"{name}: {data.dtype} {tuple(data.shape)}; a and b are {E4M3} matrices: quantize them")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"b: {tuple(b.shape)} has not a's {a.shape[1]} columns; the product is a times b transposed")
    _check_scale("a", a, a_scale, a_block)
    _check_scale("b", b, b_scale, b_block)
    _check_rest(b, out_dtype, bias, a=a, a_scale=a_scale, b_scale=b_scale)
    if backend not in (*CHOICES, "reference", *GEMMS):
        raise ValueError(f"backend: {backend!r}; allowed: auto, {', '.join(GEMMS)}, fastest, reference")


def _check_scale(name: str, data: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    expected = scale_shape(data.shape, block)
    if tuple(scale.shape) != expected or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}_scale: {scale.dtype} {tuple(scale.shape)}; {name}_block {tuple(block)} of "
            f"{tuple(data.shape)} takes torch.float32 {expected}"
        )


def _check_rest(b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, **others: Tensor | None) -> None:
    """Of a product: its result's dtype, its bias, and that all are on one device."""
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype: {out_dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if bias is not None and bias.shape != b.shape[:1]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}; allowed: ({b.shape[0]},), one number a row of b")
    check_device(b=b, bias=bias, **others)


# --- Backends --------------------------------------------------------------------------------------------------------


@constant
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's FP8 kernels run on this device; says once what is missing where a GPU could."""
    return _has_kernels(device)


@lru_cache(maxsize=16)
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn("FP8 kernels: no Triton, so they run as plain torch; `pip install triton`", stacklevel=2)
        return False
    return True


@constant
def has_one_kernel(n: int, k: int, device: torch.device) -> bool:
    """Whether fp8_linear of one token and a weight [n, k] is one kernel on this device."""
    from quantrot.kernels import nvrtc
    from quantrot.kernels.fp8 import linear

    return has_kernels(device) and nvrtc.available(device) and linear.takes_one(n, k)


def _quantizer(x: Tensor, asked: str) -> bool:
    """Whether Triton quantizes x, or ValueError where it cannot and was asked for."""
    able = has_kernels(x.device) or os.environ.get("TRITON_INTERPRET") == "1"
    if asked == "triton" and not able:
        raise ValueError(
            f"backend: 'triton' needs a CUDA device of capability 8.9 or later and Triton, x is on {x.device}; "
            "allowed here: auto, reference"
        )
    return asked == "triton" or (asked == "auto" and has_kernels(x.device))


def _turns_on_hopper(x: Tensor, order: int) -> bool:
    """Whether one CUDA kernel turns and quantizes."""
    from quantrot.kernels import nvrtc
    from quantrot.kernels.hadamard import hopper

    return nvrtc.available(x.device) and hopper.plan_for_codes(order, x.shape[1], x.dtype) is not None


def _product(asked: str, *operands) -> ModuleType | None:
    """The module that multiplies, None for the reference, or ValueError where it cannot and was asked for."""
    device = operands[0].device
    if asked == "reference" or (asked in CHOICES and not has_kernels(device)):
        return None
    if asked in CHOICES:
        modules = (importlib.import_module(GEMMS[name]) for name in CHOICES[asked])
        return next((module for module in modules if module.supports(*operands)), None)
    if not has_kernels(device) and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: {asked!r} needs a CUDA device of capability 8.9 or later, a is on {device}; "
            "allowed here: auto, reference"
        )
    module = importlib.import_module(GEMMS[asked])
    if not module.supports(*operands):
        raise ValueError(f"backend: {asked!r} needs {_needs(module)}; allowed here: auto, reference")
    return module


def _needs(module: ModuleType) -> str:
    return getattr(module, "NEEDS", "other operands or another device")


def _empty_scale(x: Tensor, shape: tuple[int, int], transposed: bool) -> Tensor:
    """float32, uninitialised, in the asked memory order."""
    if transposed:
        return torch.empty(shape[::-1], dtype=torch.float32, device=x.device).T
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _ordered(x: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """A contiguous scale in the asked memory order."""
    return _empty_scale(x, (scale.shape[0], scale.shape[1]), True).copy_(scale) if transposed else scale


def _outputs(x: Tensor, block: tuple[int, int], transposed: bool, gated: bool = False) -> tuple[Tensor, Tensor]:
    q = torch.empty((x.shape[0], x.shape[1] // (1 + gated)), dtype=E4M3, device=x.device)
    return q, _empty_scale(x, scale_shape(q.shape, block), transposed)


def _turned_outputs(x: Tensor, block: tuple[int, int], transposed: bool) -> tuple[Tensor, Tensor]:
    shape = torch.Size((x.shape[1], -(-x.shape[0] // 128) * 128))
    q = torch.empty(shape, dtype=E4M3, device=x.device)
    return q, _empty_scale(x, scale_shape(shape, block), transposed)


def _columns_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


# --- Operators -------------------------------------------------------------------------------------------------------


@implement("quantrot::quantize_fp8_block")
def _quantize(
    x: Tensor, rows: int, columns: int, rule: str, transposed_scale: bool, backend: str, gated: bool = False
) -> tuple[Tensor, Tensor]:
    if not _quantizer(x, backend):
        q, scale = quantize_reference(gate(x) if gated else x, (rows, columns), rule)
        return q, _ordered(x, scale, transposed_scale)
    from quantrot.kernels.fp8 import blocks, triton

    x, block = _columns_contiguous(x), (rows, columns)
    in_one = backend == "auto" and x.numel() > 0 and blocks.supports(x, block, gated)
    if gated and not in_one:
        return _quantize(gate(x), rows, columns, rule, transposed_scale, backend)
    q, scale = _outputs(x, block, transposed_scale, gated)
    if in_one:
        blocks.quantize(x, q, scale, block, rule, gated)
    elif x.numel():
        triton.quantize(x, q, scale, whole(block, x.shape), rule)
    return q, scale


@implement("quantrot::hadamard_quantize_fp8")
def _hadamard_quantize(
    x: Tensor,
    signs: Tensor | None,
    order: int,
    factor: float,
    rows: int,
    columns: int,
    rule: str,
    transposed_scale: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if not _quantizer(x, backend):
        q, scale = hadamard_quantize_reference(x, signs, order, factor, (rows, columns), rule)
        return q, _ordered(x, scale, transposed_scale)
    if backend == "auto" and (rows, columns) == (1, 128) and x.numel() and _turns_on_hopper(x, order):
        from quantrot.kernels.hadamard import hopper

        q, scale = _outputs(x, (rows, columns), transposed_scale)
        hopper.transform_codes(_columns_contiguous(x), q, scale, signs, order, factor, rule)
        return q, scale
    from quantrot.kernels.fp8 import triton_hadamard

    shape, shared = (order, x.shape[1], x.dtype.itemsize), shared_bytes(x.device)
    if (rows, columns) != (1, 128) or not triton_hadamard.supports(*shape, shared):
        if backend == "triton":
            raise ValueError(
                f"backend: 'triton' has no kernel for order {order}, {x.shape[1]} columns and block_size "
                f"{(rows, columns)}; allowed here: auto, reference"
            )
        turned = torch.ops.quantrot.hadamard(x, signs, order, factor, False, "auto")
        return torch.ops.quantrot.quantize_fp8_block(turned, rows, columns, rule, transposed_scale, backend)
    q, scale = _outputs(x, (rows, columns), transposed_scale)
    if x.numel():
        signs = None if signs is None else signs.contiguous()
        triton_hadamard.quantize(_columns_contiguous(x), q, scale, signs, order, factor, rule)
    return q, scale


@implement("quantrot::quantize_fp8_both_ways")
def _both_ways(
    x: Tensor, rows: int, columns: int, rule: str, transposed_scale: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    block = rows, columns
    if not _quantizer(x, backend):
        q, scale, turned, turned_scale = both_ways_reference(x, block, rule)
        return q, _ordered(x, scale, transposed_scale), turned, _ordered(x, turned_scale, transposed_scale)
    from quantrot.kernels.fp8 import triton

    q, scale = _outputs(x, block, transposed_scale)
    turned, turned_scale = _turned_outputs(x, block, transposed_scale)
    if x.numel():
        triton.quantize_both_ways(_columns_contiguous(x), q, scale, turned, turned_scale, rows == 128, rule)
    return q, scale, turned, turned_scale


@implement("quantrot::fp8_block_gemm")
def _gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: list[int],
    b_block: list[int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    backend: str,
    b_settled: bool = False,
) -> Tensor:
    operands = a, a_scale, b, b_scale, (a_block[0], a_block[1]), (b_block[0], b_block[1]), out_dtype, bias
    module = _product(backend, *operands)
    if module is None or not (a.numel() and b.numel()):
        return gemm_reference(*operands)
    return module.gemm(*operands, **({"b_settled": b_settled} if module.__name__ == GEMMS["hopper"] else {}))


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
    q, scale = _quantize(x, 1, 128, rule, True, backend)
    y = _gemm(q, scale, b, b_scale, [1, 128], b_block, x.dtype, bias, backend, b_settled)
    return gate(y) if gates else y if residual is None else y + residual


@torch.library.register_fake("quantrot::quantize_fp8_block")
def _quantize_fake(x, rows, columns, rule, transposed_scale, backend, gated=False):
    return _outputs(x, (rows, columns), transposed_scale, gated)


@torch.library.register_fake("quantrot::fp8_linear")
def _linear_fake(
    x, b, b_scale, b_block, rule, bias, backend, b_settled=False, norm=None, epsilon=0.0, residual=None, gates=False
):
    return torch.empty((x.shape[0], b.shape[0] // (1 + gates)), dtype=x.dtype, device=x.device)


@torch.library.register_fake("quantrot::hadamard_quantize_fp8")
def _hadamard_quantize_fake(x, signs, order, factor, rows, columns, rule, transposed_scale, backend):
    return _outputs(x, (rows, columns), transposed_scale)


@torch.library.register_fake("quantrot::quantize_fp8_both_ways")
def _both_ways_fake(x, rows, columns, rule, transposed_scale, backend):
    block = rows, columns
    return *_outputs(x, block, transposed_scale), *_turned_outputs(x, block, transposed_scale)


@torch.library.register_fake("quantrot::fp8_block_gemm")
def _gemm_fake(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, backend, b_settled=False):
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


# --- Autograd --------------------------------------------------------------------------------------------------------


NO_GRADIENT = (
    "FP8 codes and scales have no gradient: detach them, or put Fp8TrainingLinear.of(linear) in a linear's place; "
    "under adapters with requires_grad_(False)"
)
OPERATORS = "quantize_fp8_block", "hadamard_quantize_fp8", "quantize_fp8_both_ways", "fp8_block_gemm", "fp8_linear"
for _name in OPERATORS:
    register_no_gradient(f"quantrot::{_name}", NO_GRADIENT)
