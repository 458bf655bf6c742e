"""The product by cuBLAS, through torch._scaled_mm: DeepSeek-V3's blocks and rowwise scales, on Hopper."""

from functools import lru_cache

import torch
from torch import Tensor

NEEDS = (
    "Hopper, CUDA 12.9 or later, blocks 1 x 128 by 128 x 128, 1 x 128 by 1 x 128, 128 x 128 by 1 x 128 or (1, 0) by "
    "(1, 0), 16-byte aligned rows, M a multiple of 4 with 1 x 128 blocks, N of 16, K of 512 (128 for 1 x 128 by 1 x "
    "128, 16 for (1, 0)), a bfloat16 or float16 result and a bias of its dtype, or with blocks float32 and no bias"
)
BLOCK = 128
ROW, SQUARE = (1, BLOCK), (BLOCK, BLOCK)
PAIRS = ((ROW, SQUARE), (ROW, ROW), (SQUARE, ROW))


@lru_cache(maxsize=16)
def _available(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> bool:
    """Whether `gemm` takes this product."""
    if not _available(a.device) or (bias is not None and bias.dtype != out_dtype):
        return False
    k = a.shape[1]
    by_row = all(block[0] == 1 and (block[1] == 0 or block[1] >= k) for block in (a_block, b_block))
    if out_dtype == torch.float32 and (by_row or bias is not None):
        return False
    step = 16 if by_row else 4 * BLOCK if SQUARE in (a_block, b_block) else BLOCK
    if k % step or b.shape[0] % 16 or not (by_row or (a_block, b_block) in PAIRS):
        return False  # 4 blocks: the scales' rows are 16-byte aligned, or cuBLAS reads wrong ones
    if a_block == ROW and a.shape[0] % 4:  # likewise: cuBLAS 13.0 answers "not supported"
        return False
    return all(x.stride() == (k, 1) and x.data_ptr() % 16 == 0 for x in (a, b))


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
    left, right = _layout(a_scale, a_block), _layout(b_scale, b_block)
    return torch._scaled_mm(a, b.T, left, right.T, bias=bias, out_dtype=out_dtype, use_fast_accum=False)


def _layout(scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Scales of 1 x 128 blocks with rows side by side in memory, the others as they are written."""
    if block != ROW:
        return scale.contiguous()
    return scale if scale.T.is_contiguous() else scale.T.contiguous().T
