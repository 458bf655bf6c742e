"""The Hadamard transform in Triton: any GPU that Triton supports, orders whose padded factors fit one program.

The order is a product of up to three axes (bases and pieces of the power of two), each padded to a power of two of at
least 16. A program holds whole rows and multiplies by one axis' matrix after another with `tl.dot`. The first product
takes 16-bit input as it is (exact, float32 sums); the others are float32 by three tf32 products, or IEEE where there
is no tf32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.operators import kept
from quantrot.orthogonal import hadamard_base, hadamard_factors

TILE = 4096  # elements of a program that has several rows
LARGEST = 8192  # padded elements of a row: 16384 takes 256 KiB of shared memory, more than an H200 has
LARGEST_AXIS = 128
LARGEST_POWER = 64  # of two in one axis: with 128 a float32 program spilled 8 KiB a thread


@triton.jit
def load_matrix(h_ptr, P: tl.constexpr):
    """One axis' matrix [P, P]."""
    return tl.load(h_ptr + tl.arange(0, P)[:, None] * P + tl.arange(0, P)[None, :])


@triton.jit
def multiply_axes(
    x, h1, h2, h3, ROWS: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """ROWS rows, as x [ROWS * P1 * P2, P3], by the axes' matrices: float32 elements in x's order, not in its shape."""
    y = tl.dot(x, h3.to(x.dtype), input_precision=PRECISION, out_dtype=tl.float32)
    if P2 > 1:
        y = tl.reshape(tl.permute(tl.reshape(y, (ROWS * P1, P2, P3)), (0, 2, 1)), (ROWS * P1 * P3, P2))
        y = tl.dot(y, h2, input_precision=PRECISION, out_dtype=tl.float32)
        y = tl.reshape(tl.permute(tl.reshape(y, (ROWS * P1, P3, P2)), (0, 2, 1)), (ROWS * P1 * P2, P3))
    if P1 > 1:
        y = tl.reshape(tl.permute(tl.reshape(y, (ROWS, P1, P2 * P3)), (0, 2, 1)), (ROWS * P2 * P3, P1))
        y = tl.dot(y, h1, input_precision=PRECISION, out_dtype=tl.float32)
        y = tl.permute(tl.reshape(y, (ROWS, P2 * P3, P1)), (0, 2, 1))
    return y


@triton.jit
def _hadamard_kernel(
    x_ptr, y_ptr, signs_ptr, h1_ptr, h2_ptr, h3_ptr, rows, x_stride, sign_rows, scale,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    ROWS: tl.constexpr, SIGNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i1, i2, i3 = tl.arange(0, P1), tl.arange(0, P2), tl.arange(0, P3)
    column = (i1[:, None, None] * N2 + i2[None, :, None]) * N3 + i3[None, None, :]
    inside = (i1[:, None, None] < N1) & (i2[None, :, None] < N2) & (i3[None, None, :] < N3)
    mask = (row < rows)[:, None, None, None] & inside[None]
    x = tl.load(x_ptr + row[:, None, None, None] * x_stride + column[None], mask=mask, other=0.0)
    if SIGNS:
        at = (row % sign_rows)[:, None, None, None] * (N1 * N2 * N3) + column[None]
        x = (x * tl.load(signs_ptr + at, mask=mask, other=1)).to(x.dtype)

    h1, h2, h3 = load_matrix(h1_ptr, P1), load_matrix(h2_ptr, P2), load_matrix(h3_ptr, P3)
    y = multiply_axes(tl.reshape(x, (ROWS * P1 * P2, P3)), h1, h2, h3, ROWS, P1, P2, P3, PRECISION)
    y = tl.reshape(y, (ROWS, P1, P2, P3)) * scale
    out = y_ptr + row[:, None, None, None] * (N1 * N2 * N3) + column[None]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


def _padded(n: int) -> int:
    return 1 if n == 1 else max(16, 1 << (n - 1).bit_length())


def axes(order: int, largest: int = LARGEST) -> tuple[int, int, int] | None:
    """Three factors of the order, 1s first, none above LARGEST_AXIS, padded to at most `largest`; or None."""
    *bases, power = hadamard_factors(order)
    pieces = 1 if power <= LARGEST_POWER else 2 if power <= LARGEST_POWER**2 else 3
    if power == 1 and bases:
        pieces = 0
    bits = power.bit_length() - 1
    powers = [1 << (bits * (i + 1) // pieces - bits * i // pieces) for i in range(pieces)]
    found = [*bases, *powers]
    padded = 1
    for n in found:
        padded *= _padded(n)
    if len(found) > 3 or max(found) > LARGEST_AXIS or padded > largest:
        return None
    n1, n2, n3 = [*[1] * (3 - len(found)), *found]
    return n1, n2, n3


@kept
def _matrix(n: int, transpose: bool, device: torch.device) -> Tensor:
    """One axis' matrix, zero-padded, float32."""
    p = _padded(n)
    h = torch.zeros(p, p)
    h[:n, :n] = hadamard_base(n).T if transpose else hadamard_base(n)
    return h.to(device)


def transform(x: Tensor, y: Tensor, signs: Tensor | None, order: int, scale: float, transpose: bool) -> None:
    """x [rows, order], contiguous columns -> y [rows, order], contiguous. `axes(order)` must exist."""
    rows = x.shape[0]
    n = axes(order)
    assert n is not None, order
    p = tuple(map(_padded, n))
    size = p[0] * p[1] * p[2]
    a_program = max(1, TILE // size)
    if size * a_program < 256:  # a dot needs 16 rows
        a_program = 256 // size
    matrices = [_matrix(k, transpose, x.device) for k in n]
    cuda = x.device.type == "cuda" and torch.version.hip is None
    _hadamard_kernel[(triton.cdiv(rows, a_program),)](
        x, y, x if signs is None else signs, *matrices, rows, x.stride(0), 1 if signs is None else signs.numel() //
        order, scale, *n, *p, ROWS=a_program, SIGNS=signs is not None, PRECISION="tf32x3" if cuda else "ieee",
        num_warps=8 if size <= TILE else 16,  # with half as many 4096 and 8192 spilled 450 bytes a thread
    )  # fmt: skip
