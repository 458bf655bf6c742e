"""The Hadamard transform in plain torch: the definition every kernel is held to, and the CPU implementation.

    y = scale * (x * signs) H,    H = H_K1 (x) ... (x) H_Kr (x) S_(2^m),    over the last dimension, in `order`s

Sylvester's factor is a butterfly (Yates 1937), one addition an element and level, so a row's bits do not depend on the
rows beside it; each Paley base is one small product. Everything accumulates in float32 (float64 for float64 input) and
is rounded to the input's dtype once, to nearest even. NaN and inf reach every output of their block, as sums of +-x
do in IEEE arithmetic; the sign of a zero sum is not specified.
"""

import torch
from torch import Tensor

from quantrot.orthogonal import hadamard_base, hadamard_factors

CHUNK = 1 << 17  # elements worked on at a time: three float32 copies stay in a core's L2 cache
MAX_RELATIVE_ERROR = {  # ||y - exact|| / ||exact|| of every implementation and order; right: one rounding alone
    torch.bfloat16: 1.9e-3,  # 1.66e-3
    torch.float16: 3.0e-4,  # 2.07e-4
    torch.float32: 5e-7,
    torch.float64: 1e-14,
}


def hadamard_reference(x: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool = False) -> Tensor:
    """x [..., k * order] -> scale * (x * signs) H, or its adjoint scale * (x H^T) * signs; contiguous, x's dtype.

    signs: [order] or [k * order] of +-1, any dtype, or None. No checks: the public functions own them.
    """
    width = x.shape[-1]
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.reshape(-1, width)
    if signs is not None:
        signs = signs.to(work).repeat(width // signs.numel())
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK // max(width, 1))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].to(work)
        if signs is not None and not transpose:
            part = part * signs
        part = _transform(part.reshape(-1, order), order, transpose).view(-1, width)
        if signs is not None and transpose:
            part = part * signs
        out[start : start + step] = part * scale
    return out.view(x.shape)


def _transform(x: Tensor, order: int, transpose: bool) -> Tensor:
    """x [rows, order] @ H, unscaled, in x's precision; products with a base in float64: in float32 their bits depended
    on the number of rows, since a CPU's library adds one row in another order than many."""
    *bases, power = hadamard_factors(order)
    outer, inner = x.shape[0], order
    for base in bases:
        inner //= base
        h = hadamard_base(base).to(x.device, torch.float64)
        x = torch.matmul(h if transpose else h.T, x.reshape(outer, base, inner).double()).to(x.dtype)
        outer *= base
    return butterfly(x.reshape(outer, power))


def butterfly(x: Tensor) -> Tensor:
    """x [rows, 2^m] times Sylvester's matrix, unscaled."""
    rows, half = x.shape[0], x.shape[1] // 2
    spare = [torch.empty_like(x) for _ in range(min(2, half.bit_length()))]
    while half:
        out = spare[0]
        pair, result = x.view(rows, -1, 2, half), out.view(rows, -1, 2, half)
        torch.add(pair[:, :, 0], pair[:, :, 1], out=result[:, :, 0])
        torch.sub(pair[:, :, 0], pair[:, :, 1], out=result[:, :, 1])
        spare.reverse()
        x, half = out, half // 2
    return x
