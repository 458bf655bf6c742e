"""GPTQ's inner loop: columns of a weight rounded one after the other, each to make up for the errors before it.

    round_columns   targets, columns, steps [B, m], factor [B, B] float32 -> rounded, errors [B, m] float32
    nearest         float32, in steps -> the nearest numbers that a code has

Column k of a block of B is a row here, of m weights, which do not know of each other. In this order, for every k,

    rounded_k = nearest((targets_k + sum over j < k of errors_j factor_kj) / steps_k)
    errors_k  = columns_k - rounded_k steps_k

What is on and above factor's diagonal is not read. Sums, whose order is the backend's, products and quotients are
float32. On a GPU the reference, whose kernels take a column, needs 200 times as long as one Triton kernel a block (18.9
ms and 88 us for 128 columns of 4096 weights on an H100: benchmarks/bench_gptq.py).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from quantrot.kernels.fp8.reference import E4M3, E4M3_MAX
from quantrot.kernels.mixed.reference import INT8_MAX
from quantrot.kernels.mxfp4.reference import round_e2m1
from quantrot.kernels.operators import check_device, implement, uses_triton

Kind = Literal["mxfp4", "int8", "fp8"]
Backend = Literal["auto", "triton", "reference"]


def nearest(x: Tensor, kind: Kind) -> Tensor:
    """x, float32 in steps, to the nearest numbers of e2m1, int8 (-127 to 127) or e4m3, ties to even, clipped."""
    if kind == "mxfp4":
        return round_e2m1(x)
    if kind == "int8":
        return x.round().clamp_(-INT8_MAX, INT8_MAX)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(torch.float32)


def round_columns(
    targets: Tensor, columns: Tensor, steps: Tensor, factor: Tensor, kind: Kind, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(rounded, errors) of a block, as the head of this file has it. targets and columns differ by what the columns
    before the block make up for. ValueError for other shapes, dtypes and devices."""
    operands = {"targets": targets, "columns": columns, "steps": steps, "factor": factor}
    for name, t in operands.items():
        shape = targets.shape if name != "factor" else (len(targets),) * 2
        if t.dim() != 2 or t.shape != shape or t.dtype != torch.float32:
            allowed = f"float32 {[*shape]}, by targets' shape" if targets.dim() == 2 else "float32 [B, m]"
            raise ValueError(f"{name}: {t.dtype} {[*t.shape]}; allowed: {allowed}")
    if kind not in get_args(Kind) or backend not in get_args(Backend):
        raise ValueError(f"kind {kind!r}, backend {backend!r}; allowed: {get_args(Kind)}, {get_args(Backend)}")
    check_device(**operands)
    return torch.ops.quantrot.round_columns(targets, columns, steps, factor, kind, backend)


torch.library.define(
    "quantrot::round_columns",
    "(Tensor targets, Tensor columns, Tensor steps, Tensor factor, str kind, str backend) -> (Tensor, Tensor)",
)


@implement("quantrot::round_columns")
def _round_columns(
    targets: Tensor, columns: Tensor, steps: Tensor, factor: Tensor, kind: Kind, backend: Backend
) -> tuple[Tensor, Tensor]:
    if uses_triton(targets, backend):
        from quantrot.kernels.gptq import triton

        return triton.round_columns(targets, columns, steps, factor, kind)
    return _reference(targets, columns, steps, factor, kind)


@torch.library.register_fake("quantrot::round_columns")
def _round_columns_fake(
    targets: Tensor, columns: Tensor, steps: Tensor, factor: Tensor, kind: str, backend: str
) -> tuple[Tensor, Tensor]:
    return targets.new_empty(targets.shape), targets.new_empty(targets.shape)


def _reference(targets: Tensor, columns: Tensor, steps: Tensor, factor: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    rounded, errors = (targets.new_empty(targets.shape) for _ in range(2))  # contiguous, whatever targets are
    rows = zip(*(t.unbind() for t in (targets, columns, steps, factor, rounded, errors)), strict=True)
    for k, (target, column, step, weights, near, error) in enumerate(rows):  # 75 us a column; by indexing 88
        near.copy_(nearest(torch.addmv(target, errors[:k].T, weights[:k]).div_(step), kind))
        torch.sub(column, near * step, out=error)
    return rounded, errors
