"""triton_gemm with K split for few rows: more programs read the weight, a second launch adds their parts in order."""

import torch
from torch import Tensor

from quantrot.kernels.fp8.triton_gemm import NEEDS, run, supports
from quantrot.kernels.fp8.tuned import split_plan

__all__ = ["NEEDS", "gemm", "supports"]


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """[M, N] in out_dtype; none of M, N, K is 0."""
    plan = split_plan(a.shape[0], b.shape[0], a.shape[1])
    return run(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, plan)
