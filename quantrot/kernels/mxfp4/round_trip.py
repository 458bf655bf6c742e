"""What a product of MXFP4 sees of its activations on a CPU, by the rule `even`, in as few operations as it takes.

One token is so few numbers that each of torch's operations takes its microsecond whatever it computes: 1536 numbers
take 39 us here and 75 by `round_trip_reference`, turned in blocks of 32 61 and 119 (two threads).
"""

from functools import cache

import torch
from torch import Tensor

from quantrot.kernels.mxfp4.reference import E2M1_MAX, FINE, GROUP, TURNED_LIMIT, float32
from quantrot.kernels.scratch import LARGEST

CHUNK = LARGEST  # numbers at a time
MOST_TURNED = 1 << 16  # numbers up to which turning by rows is faster than the reference's by columns


def round_trip_even(x: Tensor, hadamard: int) -> Tensor:
    """round_trip_reference(x, ScaleRule.even, hadamard=hadamard)."""
    rows = x.detach().reshape(-1, hadamard or GROUP).contiguous()
    each = CHUNK // rows.shape[1]
    if len(rows) <= each:
        return _of(rows, hadamard).view(x.shape)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    for start in range(0, len(rows), each):
        out[start : start + each] = _of(rows[start : start + each], hadamard).view(-1, rows.shape[1])
    return out.view(x.shape)


def _of(rows: Tensor, hadamard: int) -> Tensor:
    """[groups, 32] in the dtype of rows. Adding 1.5 * 2^23 steps rounds numbers of both signs alike."""
    groups = rows.float()
    for across, signs in _stages(hadamard):
        other = groups.index_select(1, across)
        groups = torch.addcmul(other, groups, signs, out=other)
    groups, root = groups.view(-1, GROUP), float32((hadamard or 1) ** -0.5)
    amax = groups.abs().amax(1, keepdim=True).mul_(root)
    half = (1 << 21) + ((1 << 12) if hadamard else 0)  # of the one mantissa bit that is kept, and of float16's last
    # Twice the scale: no subnormal, which torch.set_flush_denormal makes zero.
    unit = (amax.view(torch.int32) + half).bitwise_and_(0x7F800000).sub_(1 << 23).clamp_(min=1 << 23)
    unit = unit.view(torch.float32)
    if hadamard:
        y = groups.mul(unit.reciprocal().mul_(root).mul_(2 * FINE)).half().float().mul_(0.5 / FINE)
    else:
        y = groups / unit
    y.clamp_(-E2M1_MAX / 2, E2M1_MAX / 2)
    magic = y.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=0x3F000000)  # the binade, 0.5, 1 or 2: two steps
    magic = magic.view(torch.float32).mul_(0.75 * 2**23)
    unit.masked_fill_(~(amax < (TURNED_LIMIT if hadamard else torch.inf)), torch.nan)
    return y.add_(magic).sub_(magic).mul_(unit).copysign_(groups).to(rows.dtype)


@cache
def _stages(hadamard: int) -> list[tuple[Tensor, Tensor]]:
    """Of Sylvester's matrix, from the widest stride down: which column is added to each, and the column's own sign."""
    with torch.inference_mode(False), torch.device("cpu"):  # what is kept is of use in every mode
        columns, strides = torch.arange(hadamard), [1 << i for i in reversed(range(hadamard.bit_length() - 1))]
        return [(columns ^ stride, 1.0 - 2.0 * (columns & stride > 0).float()) for stride in strides]
