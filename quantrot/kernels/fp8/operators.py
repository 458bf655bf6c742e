"""The quantizers' operators, and what products share with them."""

import os
import warnings
from functools import lru_cache, partial

import torch
from torch import Tensor

from quantrot.kernels.fp8.reference import (
    E4M3,
    Fp8ScaleRule,
    both_ways_reference,
    gate,
    hadamard_quantize_reference,
    quantize_reference,
    scale_shape,
    whole,
)
from quantrot.kernels.hadamard import check_transform
from quantrot.kernels.operators import (
    check_bias,
    check_device,
    constant,
    implement,
    refuse_tangents,
    register_no_gradient,
    shared_bytes,
)
from quantrot.kernels.ready import Ready, Run, like, unseen

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_RULES = tuple(rule.value for rule in Fp8ScaleRule)  # Dynamo of torch 2.11 cannot iterate over an Enum
QUANTIZERS = ("auto", "triton", "reference")
READY = Ready()  # of quantizers
NO_GRADIENT = (
    "FP8 codes and scales have no gradient: detach them, or put Fp8TrainingLinear.of(linear) in a linear's place; "
    "under adapters with requires_grad_(False)"
)

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


# --- Public -----------------------------------------------------------------------------------------------------------


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
    key = None
    if x.is_cuda and backend == "auto" and unseen(x):
        key = like(x), tuple(block), scale_rule, transposed_scale, gated
        if (again := READY.find(key)) is not None:
            return again(x)
    rule = check_input("quantize_fp8_block", x, block, scale_rule, backend)
    _check_gated(x, gated)
    if key and (run := in_one_kernel(x, (block[0], block[1]), rule, transposed_scale, gated)):
        return READY.keep(key, run, x.get_device())(x)
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

    The transform's float32 sums are quantized as they are, but where CUDA's kernel for orders past 1024 (not 2048, nor
    a few of large bases) rounds once to bfloat16 inside, which is as much as leaving in bfloat16. "auto" does both in
    one CUDA kernel on Hopper for 1 x 128 blocks and 16-bit orders 32, 64 and multiples of 128 (where there is a kernel
    for them), and "triton" in one for many others of at most 14336; where neither can, "auto" on a GPU runs the two
    operators one after the other, with x's dtype, and one rounding to it, in between. Sums in another order differ in
    their last bits, so a code near a tie may be its neighbour: within one step of the reference's, but behind such a
    rounding.
    """
    key = None
    if x.is_cuda and backend == "auto" and unseen(x, signs):
        key = "turned", like(x), order, block, like(signs), scale, tuple(block_size), scale_rule, transposed_scale
        if (again := READY.find(key)) is not None:
            return again(x, signs)
    rule = check_input("hadamard_quantize_fp8", x, block_size, scale_rule, backend)
    size, read, factor = check_transform(x, order, block, signs, scale, "auto")
    rows, columns = block_size
    how = size, factor, (rows, columns), rule, transposed_scale
    if key and read is signs and (run := _turned_in_one(x, signs, *how)):
        return READY.keep(key, run, x.get_device())(x, signs)
    return torch.ops.quantrot.hadamard_quantize_fp8(
        x, read, size, factor, rows, columns, rule, transposed_scale, backend
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
    nothing. Otherwise as quantize_fp8_block, but for the rule that scales follow by default.
    """
    key = None
    if x.is_cuda and backend == "auto" and unseen(x):
        key = "both ways", like(x), tuple(block), scale_rule, transposed_scale
        if (again := READY.find(key)) is not None:
            return again(x)
    if tuple(block) not in ((1, 128), (128, 128)):
        raise ValueError(f"block: {tuple(block)}; allowed: (1, 128), (128, 128)")
    rule = check_input("quantize_fp8_both_ways", x, block, scale_rule, backend)
    if key and _quantizer(x, backend):
        return READY.keep(key, read_once(x, (block[0], block[1]), rule, transposed_scale, backend), x.get_device())(x)
    return torch.ops.quantrot.quantize_fp8_both_ways(x, block[0], block[1], rule, transposed_scale, backend)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _check_block(name: str, block: tuple[int, int]) -> None:
    if len(block) != 2 or min(block) < 0:
        raise ValueError(f"{name}: {tuple(block)}; give (rows, columns), each positive, or 0 for the whole dimension")


def check_input(name: str, x: Tensor, block: tuple[int, int], rule: Fp8ScaleRule | str, backend: str) -> str:
    """The rule's name, or ValueError."""
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; {name} takes [M, K]: flatten leading dimensions")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}; convert it first")
    _check_block("block_size" if name == "hadamard_quantize_fp8" else "block", block)
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: {rule!r}; allowed: {', '.join(SCALE_RULES)}")
    if backend not in QUANTIZERS:
        raise ValueError(f"backend: {backend!r}; allowed: {', '.join(QUANTIZERS)}")
    refuse_tangents(x)
    return str(rule)


def _check_gated(x: Tensor, gated: bool) -> None:
    if gated and x.shape[1] % 2:
        raise ValueError(f"x: {x.shape[1]} columns; gated, it is [M, 2 K]: gate and up side by side")


def check_scale(name: str, data: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    _check_block(f"{name}_block", block)
    expected = scale_shape(data.shape, block)
    if tuple(scale.shape) != expected or scale.dtype != torch.float32:
        raise ValueError(
            f"{name}_scale: {scale.dtype} {tuple(scale.shape)}; {name}_block {tuple(block)} of "
            f"{tuple(data.shape)} takes torch.float32 {expected}"
        )


def check_rest(b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, **others: Tensor | None) -> None:
    """Of a product: its result's dtype, its bias, and that all are on one device."""
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype: {out_dtype}; allowed: {', '.join(map(str, DTYPES))}")
    check_bias(bias, b.shape[0])
    check_device(b=b, bias=bias, **others)
    refuse_tangents(bias, *others.values())


# --- Backends ---------------------------------------------------------------------------------------------------------


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
    from quantrot.kernels.hadamard import codes

    return nvrtc.available(x.device) and codes.plan_for_codes(order, x.shape[1], x.dtype) is not None


def _empty_scale(x: Tensor, shape: tuple[int, int], transposed: bool) -> Tensor:
    """float32, uninitialised, in the asked memory order."""
    if transposed:
        return torch.empty(shape[::-1], dtype=torch.float32, device=x.device).T
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _ordered(x: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """A contiguous scale in the asked memory order."""
    return _empty_scale(x, (scale.shape[0], scale.shape[1]), True).copy_(scale) if transposed else scale


def outputs(x: Tensor, block: tuple[int, int], transposed: bool, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of x, uninitialised."""
    q = torch.empty((x.shape[0], x.shape[1] // (1 + gated)), dtype=E4M3, device=x.device)
    return q, _empty_scale(x, scale_shape(q.shape, block), transposed)


def _turned_outputs(x: Tensor, block: tuple[int, int], transposed: bool) -> tuple[Tensor, Tensor]:
    shape = torch.Size((x.shape[1], -(-x.shape[0] // 128) * 128))
    q = torch.empty(shape, dtype=E4M3, device=x.device)
    return q, _empty_scale(x, scale_shape(shape, block), transposed)


def _columns_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def in_one_kernel(x: Tensor, block: tuple[int, int], rule: str, transposed_scale: bool, gated: bool) -> Run | None:
    """The quantizer that "auto" takes on Hopper, as a function of x; None where that has no kernel for it."""
    from quantrot.kernels.fp8 import blocks

    if not has_kernels(x.device) or not x.numel() or not blocks.supports(x, block, gated):
        return None
    quantize_x = blocks.prepare(x, *outputs(x, block, transposed_scale, gated), block, rule, gated)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = outputs(x, block, transposed_scale, gated)
        quantize_x(x, q, scale)
        return q, scale

    return run


def read_once(x: Tensor, block: tuple[int, int], rule: str, transposed_scale: bool, backend: str) -> Run:
    """`quantize_fp8_both_ways` of matrices like x on a GPU, as a function of them: by "auto" in CUDA if it can."""
    from quantrot.kernels.fp8 import both_ways, triton

    def made(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *outputs(x, block, transposed_scale), *_turned_outputs(x, block, transposed_scale)

    x = _columns_contiguous(x)
    if backend == "auto" and both_ways.supports(x, block):
        quantize_x = both_ways.prepare(x, *made(x), block, rule)
    else:
        quantize_x = partial(triton.quantize_both_ways, square=block[0] == 128, rule=rule)

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        codes = made(x)
        if x.numel():
            quantize_x(_columns_contiguous(x), *codes)
        return codes

    return run


def _turned_in_one(
    x: Tensor,
    signs: Tensor | None,
    order: int,
    factor: float,
    block: tuple[int, int],
    rule: str,
    transposed_scale: bool,
) -> Run | None:
    """The same behind a Hadamard transform, as a function of x and signs."""
    if block != (1, 128) or not has_kernels(x.device) or not x.numel() or not _turns_on_hopper(x, order):
        return None
    from quantrot.kernels.hadamard import codes

    transform = codes.prepare_codes(
        _columns_contiguous(x), *outputs(x, block, transposed_scale), signs, order, factor, rule
    )

    def run(x: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
        q, scale = outputs(x, block, transposed_scale)
        transform(_columns_contiguous(x), q, scale, signs)
        return q, scale

    return run


# --- Operators --------------------------------------------------------------------------------------------------------


@implement("quantrot::quantize_fp8_block")
def quantize(
    x: Tensor, rows: int, columns: int, rule: str, transposed_scale: bool, backend: str, gated: bool = False
) -> tuple[Tensor, Tensor]:
    if not _quantizer(x, backend):
        q, scale = quantize_reference(gate(x) if gated else x, (rows, columns), rule)
        return q, _ordered(x, scale, transposed_scale)
    from quantrot.kernels.fp8 import triton

    x, block = _columns_contiguous(x), (rows, columns)
    if backend == "auto" and (run := in_one_kernel(x, block, rule, transposed_scale, gated)):
        return run(x)
    if gated:
        return quantize(gate(x), rows, columns, rule, transposed_scale, backend)
    q, scale = outputs(x, block, transposed_scale)
    if x.numel():
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
    turned = x, signs, order, factor, (rows, columns), rule, transposed_scale
    if backend == "auto" and (run := _turned_in_one(*turned)):
        return run(x, signs)
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
    q, scale = outputs(x, (rows, columns), transposed_scale)
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
    return read_once(x, block, rule, transposed_scale, backend)(x)


@torch.library.register_fake("quantrot::quantize_fp8_block")
def _quantize_fake(x, rows, columns, rule, transposed_scale, backend, gated=False):
    return outputs(x, (rows, columns), transposed_scale, gated)


@torch.library.register_fake("quantrot::hadamard_quantize_fp8")
def _hadamard_quantize_fake(x, signs, order, factor, rows, columns, rule, transposed_scale, backend):
    return outputs(x, (rows, columns), transposed_scale)


@torch.library.register_fake("quantrot::quantize_fp8_both_ways")
def _both_ways_fake(x, rows, columns, rule, transposed_scale, backend):
    block = rows, columns
    return *outputs(x, block, transposed_scale), *_turned_outputs(x, block, transposed_scale)


for _name in ("quantize_fp8_block", "hadamard_quantize_fp8", "quantize_fp8_both_ways"):
    register_no_gradient(f"quantrot::{_name}", NO_GRADIENT)
