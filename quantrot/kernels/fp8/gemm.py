"""The product of two quantized matrices."""

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels.fp8 import hopper
from quantrot.kernels.fp8.operators import NO_GRADIENT, check_rest, check_scale, has_kernels
from quantrot.kernels.fp8.reference import E4M3, gemm_reference
from quantrot.kernels.operators import implement, register_no_gradient
from quantrot.kernels.ready import Ready, Run, like, unseen

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

READY = Ready()

torch.library.define(
    "quantrot::fp8_block_gemm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, int[] b_block, ScalarType out_dtype, "
    "Tensor? bias, str backend, bool b_settled=False) -> Tensor",
)


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
    key, operands = None, (a, a_scale, b, b_scale, bias)
    if a.is_cuda and backend in CHOICES and unseen(*operands):
        key = *map(like, operands), tuple(a_block), tuple(b_block), out_dtype, b_settled, backend
        if (again := READY.find(key)) is not None:
            return again(*operands, None)
    check_product(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, backend)
    if key and (run := chosen(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, backend, b_settled)):
        return READY.keep(key, run, a.get_device())(*operands, None)
    return torch.ops.quantrot.fp8_block_gemm(
        a, a_scale, b, b_scale, list(a_block), list(b_block), out_dtype, bias, backend, b_settled
    )


def check_product(
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
    check_scale("a", a, a_scale, a_block)
    check_scale("b", b, b_scale, b_block)
    check_rest(b, out_dtype, bias, a=a, a_scale=a_scale, b_scale=b_scale)
    if backend not in (*CHOICES, "reference", *GEMMS):
        raise ValueError(f"backend: {backend!r}; allowed: auto, {', '.join(GEMMS)}, fastest, reference")


def _multiplier(asked: str, *operands) -> ModuleType | None:
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


def chosen(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    choice: str,
    b_settled: bool,
) -> Run | None:
    """The product as `hopper.prepare` has it, by what this choice takes first; None where no module does."""
    how: Any = (a_block[0], a_block[1]), (b_block[0], b_block[1]), out_dtype
    if not (a.numel() and b.numel()) or not (module := _multiplier(choice, a, a_scale, b, b_scale, *how, bias)):
        return None
    if module is hopper:
        operands: Any = a, a_scale, b, b_scale, *how, bias, None
        return hopper.prepare(*operands, b_settled=b_settled)
    return lambda a, a_scale, b, b_scale, bias, residual: module.gemm(a, a_scale, b, b_scale, *how, bias)


def _needs(module: ModuleType) -> str:
    return getattr(module, "NEEDS", "other operands or another device")


@implement("quantrot::fp8_block_gemm")
def gemm(
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
    module = _multiplier(backend, *operands)
    if module is None or not (a.numel() and b.numel()):
        return gemm_reference(*operands)
    return module.gemm(*operands, **({"b_settled": b_settled} if module.__name__ == GEMMS["hopper"] else {}))


@torch.library.register_fake("quantrot::fp8_block_gemm")
def _gemm_fake(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, backend, b_settled=False):
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


register_no_gradient("quantrot::fp8_block_gemm", NO_GRADIENT)
