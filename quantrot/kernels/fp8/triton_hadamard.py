"""The online Hadamard and the quantization behind it in one Triton kernel: x is read once, codes are written once.

A program transforms whole rows of `order` elements by the transform's own products, in float32, and quantizes those
float32 values: there is no rounding to 16 bits between the two. Groups of 128 columns need the transformed row as it
lies in memory. That holds where the order is not padded, or only its outermost axis is: then what is past the row's end
is a zero, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.fp8.triton import NATIVE, codes, magnitude_bits, scale_of
from quantrot.kernels.fp8.tuned import TurnPlan, turn_plan
from quantrot.kernels.hadamard.triton import LARGEST_AXIS, _matrix, _padded, axes, load_matrix, multiply_axes
from quantrot.kernels.operators import HOPPER_SHARED, kept
from quantrot.orthogonal import hadamard_factors

GROUP = 128
BYTES_EACH = 8  # of shared memory, a padded element of a row
LARGEST = 16384  # padded elements of a row: 139 KB of shared memory, 127 registers of 512 threads
# Padded axes of the kernels whose codes were right on an H200, compiled by Triton 3.6. It compiles (1, 16, 32),
# (1, 32, 32) and (1, 64, 32) wrongly, whatever the rows and warps; the others that there could be have not run on one.
RIGHT = {(1, 1, n) for n in (32, 64, 128)} | {(1, n, 128) for n in (16, 32, 64)} | {(1, n, 64) for n in (16, 32, 64)}
RIGHT |= {(1, n, 16) for n in (32, 64)} | {(n, 32, 16) for n in (16, 32)}


@triton.jit
def _kernel(
    x_ptr, q_ptr, scale_ptr, signs_ptr, h1_ptr, h2_ptr, h3_ptr, rows, columns, x_stride, scale_row, scale_column,
    sign_rows, factor, loop,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    ROWS: tl.constexpr, SIGNS: tl.constexpr, PRECISION: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`loop` times ROWS rows of N1 * N2 * N3 a program; several of them make a row of x."""
    ORDER: tl.constexpr = N1 * N2 * N3
    SIZE: tl.constexpr = P1 * P2 * P3
    GROUPS: tl.constexpr = ROWS * SIZE // 128
    h1, h2, h3 = load_matrix(h1_ptr, P1), load_matrix(h2_ptr, P2), load_matrix(h3_ptr, P3)
    a_row = columns // ORDER
    column = tl.arange(0, SIZE)[None, :]
    i = column // P3 * N3 + column % P3  # the last axis is never padded unless it is the only one
    for turn in tl.range(loop):
        first_row = (tl.program_id(0) * loop + turn).to(tl.int64) * ROWS
        row = first_row + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (i < ORDER)
        x = tl.load(x_ptr + row // a_row * x_stride + row % a_row * ORDER + i, mask=mask, other=0.0)
        if SIGNS:
            x = (x * tl.load(signs_ptr + row % sign_rows * ORDER + i, mask=mask, other=1)).to(x.dtype)
        x = tl.reshape(x, (ROWS * P1 * P2, P3))
        y = tl.reshape(multiply_axes(x, h1, h2, h3, ROWS, P1, P2, P3, PRECISION), (GROUPS, 128)) * factor
        scale = scale_of(tl.max(magnitude_bits(y), 1).to(tl.float32, bitcast=True), RULE)
        q = codes(y, scale[:, None], RULE, NATIVE)

        flat = tl.arange(0, GROUPS) * 128
        group_row, first = first_row + flat // SIZE, flat % SIZE
        at = group_row * ORDER + first
        end = tl.where(SIZE >= 128, ORDER - first, 128)
        inside = (group_row < rows) & (first < ORDER)
        lane = tl.arange(0, 128)[None, :]
        tl.store(q_ptr + at[:, None] + lane, q, mask=inside[:, None] & (lane < end[:, None]))
        left = (group_row % a_row).to(tl.int32) * ORDER + first
        tl.store(scale_ptr + group_row // a_row * scale_row + left // 128 * scale_column, scale, mask=inside)


def _axes(order: int, itemsize: int) -> tuple[int, int, int] | None:
    """The transform's axes, but 128 stays one axis of 16-bit values, where 8 x 16 would pad an inner one, and 32 is not
    the last of several (see RIGHT)."""
    *bases, power = hadamard_factors(order)
    if power != LARGEST_AXIS or itemsize != 2 or len(bases) > 2:
        n = axes(order, LARGEST)
        if n is None or n[2] != 32 or n[1] == 1:
            return n
        return (n[0], 2 * n[1], 16) if n[1] & (n[1] - 1) == 0 else None
    n1, n2, n3 = [*[1] * (2 - len(bases)), *bases, power]
    fits = max(n1, n2) <= LARGEST_AXIS and _padded(n1) * _padded(n2) * n3 <= LARGEST
    return (n1, n2, n3) if fits else None


def supports(order: int, columns: int, itemsize: int, shared: int = HOPPER_SHARED) -> bool:
    """Whether one kernel does it, with so many bytes of shared memory: see the top of the file."""
    n = _axes(order, itemsize)
    if n is None or tuple(map(_padded, n)) not in RIGHT:
        return False
    outer = next((i for i, k in enumerate(n) if k > 1), 2)  # the first axis that is not 1 may be padded
    if any(_padded(k) != k for k in n[outer + 1 :]) or (outer == 2 and _padded(n[2]) != n[2]):
        return False
    size = _padded(n[0]) * _padded(n[1]) * _padded(n[2])
    if size * BYTES_EACH > shared:
        return False
    if order == size:
        return columns % GROUP == 0
    return order == columns or order % GROUP == 0


def quantize(x: Tensor, q: Tensor, scale: Tensor, signs: Tensor | None, order: int, factor: float, rule: str) -> None:
    """x [M, K], contiguous columns -> q [M, K] contiguous and scale of 1 x 128 blocks. `supports` must hold."""
    n = _axes(order, x.dtype.itemsize)
    assert n is not None and supports(order, x.shape[1], x.dtype.itemsize), (order, x.shape)
    size = _padded(n[0]) * _padded(n[1]) * _padded(n[2])
    run(x, q, scale, signs, order, factor, rule, turn_plan(size, x.numel(), x.dtype.itemsize))


def run(
    x: Tensor, q: Tensor, scale: Tensor, signs: Tensor | None, order: int, factor: float, rule: str, plan: TurnPlan
) -> None:
    """Transform and quantize by this plan."""
    n = _axes(order, x.dtype.itemsize)
    assert n is not None, order
    p = tuple(map(_padded, n))
    rows, sign_rows = x.numel() // order, 1 if signs is None else signs.numel() // order
    h1, h2, h3 = (_matrix(k, False, x.device) for k in n)
    if x.dtype.itemsize == 2:
        h3 = _narrow(n[2], x.dtype, x.device)
    cuda = torch.version.hip is None and NATIVE
    _kernel[(triton.cdiv(rows, plan.rows * plan.loop),)](
        x, q, scale, x if signs is None else signs, h1, h2, h3, rows, x.shape[1], x.stride(0), *scale.stride(),
        sign_rows, factor, plan.loop, *n, *p, ROWS=plan.rows, SIGNS=signs is not None,
        PRECISION="tf32x3" if cuda else "ieee", RULE=rule, NATIVE=NATIVE, num_warps=plan.warps,
    )  # fmt: skip


@kept
def _narrow(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The last axis' matrix in 16 bits, which +-1 fits."""
    return _matrix(n, False, torch.device("cpu")).to(device, dtype)  # which waits: another stream may read it
