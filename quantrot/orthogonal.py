"""Orthogonal matrices by construction: Hadamard matrices of any known order, and random ones.

A Hadamard matrix H of order n has entries +-1 and H H^T = n I, so H / sqrt(n) is orthogonal. Every order that quantrot
uses is a Kronecker product of a few small base matrices and one Sylvester matrix:

    H_n = H_K1 (x) ... (x) H_Kr (x) S_(2^m)        n = K1 * ... * Kr * 2^m

`hadamard_factors` picks the bases; the offline fold and the online kernels both read it, so the two halves of a
rotation are the same matrix by construction. Base matrices come from Paley (1933): with Q the Jacobsthal matrix of
GF(q), Q[a, b] = chi(a - b),

    Paley I    q = 3 mod 4    order q + 1         I + S,  S the skew matrix [[0, 1], [-1, Q]]
    Paley II   q = 1 mod 4    order 2 (q + 1)     each 0 of C = [[0, 1], [1, Q]] -> [[1, -1], [-1, -1]],
                                                  each +-1 -> +-[[1, 1], [1, -1]]

and, where neither reaches (172, for widths of 43 * 2^m such as 11008), from four circulant matrices of a prime order p
whose autocorrelations cancel, in the array of Goethals and Seidel (1967): order 4 p.

Everything here is float64 or int8 on the CPU, depends on nothing but its arguments, and is the same on every machine:
signs are bits of SHAKE-256, not of a library's generator.
"""

import hashlib
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

RotationKind = Literal["hadamard", "random-hadamard", "random-orthogonal", "learned"]

MAX_BASE = 1024  # a base this large is a dense product of that width; past it a rotation stops paying
# Prime p: (order of a subgroup of GF(p)*, four sets of its cosets by bits). A circulant matrix's first row is 1 at zero
# and +-1 constant on each coset; these four's autocorrelations sum to zero (found by trying all).
SUPPLEMENTARY = {43: (7, (0b001110, 0b011100, 0b000101, 0b001011))}
FACTOR_COST = 16  # one more factor costs about as much as 16 more columns in one (a pass over the data)
SPLIT_COST = 64  # and two bases are no single product: 20 x 20 x 64 ran at 0.27 of copy speed, 148 x 128 at 0.38


# --- Finite fields ---------------------------------------------------------------------------------------------------


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with p prime and p**k == q, or None."""
    for p in range(2, int(q**0.5) + 1):
        if q % p == 0:
            k = 0
            while q % p == 0:
                q //= p
                k += 1
            return (p, k) if q == 1 else None
    return (q, 1) if q > 1 else None


def _multiply(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], p: int) -> tuple[int, ...]:
    """Product of two elements of GF(p)[x] / modulus; coefficients from x^0 up, `modulus` monic without its x^k."""
    k = len(modulus)
    wide = [0] * (2 * k - 1)
    for (i, x), (j, y) in product(enumerate(a), enumerate(b)):
        wide[i + j] += x * y
    for top in range(2 * k - 2, k - 1, -1):
        for i, m in enumerate(modulus):
            wide[top - k + i] -= wide[top] * m
    return tuple(w % p for w in wide[:k])


def _generates(element: tuple[int, ...], modulus: tuple[int, ...], p: int) -> bool:
    """Whether the powers of `element` run through all p**k - 1 nonzero residues (so the ring is a field)."""
    one = (1, *([0] * (len(modulus) - 1)))
    power, steps = element, 1
    while power != one:
        if steps >= p ** len(modulus) - 1 or not any(power):
            return False
        power, steps = _multiply(power, element, modulus, p), steps + 1
    return steps == p ** len(modulus) - 1


def _quadratic_character(q: int) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], int]]:
    """The elements of GF(q), and chi: 0 at zero, 1 at nonzero squares, -1 elsewhere."""
    p, k = _prime_power(q) or (0, 0)
    elements = [tuple(e) for e in product(range(p), repeat=k)]
    for modulus in elements:
        generator = ((-modulus[0]) % p,) if k == 1 else (0, 1, *([0] * (k - 2)))
        if any(generator) and _generates(generator, modulus, p):
            break
    chi, power = {elements[0]: 0}, generator
    for i in range(1, q):
        chi[power] = -1 if i % 2 else 1
        power = _multiply(power, generator, modulus, p)
    return elements, chi


# --- Hadamard matrices -----------------------------------------------------------------------------------------------


def _paley(order: int) -> tuple[int, int] | None:
    """(q, type) of the Paley construction that gives `order`, or None."""
    if _prime_power(order - 1) and (order - 1) % 4 == 3:
        return order - 1, 1
    half = order // 2 - 1
    if order % 4 == 0 and half > 1 and half % 4 == 1 and _prime_power(half):
        return half, 2
    return None


def _goethals_seidel(p: int) -> Tensor:
    """The matrix of order 4 p from four circulant ones: [[A, BR, CR, DR], [-BR, A, D'R, -C'R], ...], R the reversal."""
    subgroup, sets = SUPPLEMENTARY[p]
    classes = (p - 1) // subgroup
    root = next(g for g in range(2, p) if len({pow(g, i, p) for i in range(p - 1)}) == p - 1)
    coset = {pow(root, i, p): i % classes for i in range(p - 1)}
    shift = (torch.arange(p) - torch.arange(p).unsqueeze(1)) % p
    rows = [[1, *(1 if chosen >> coset[i] & 1 else -1 for i in range(1, p))] for chosen in sets]
    a, b, c, d = (torch.tensor(row, dtype=torch.int8)[shift] for row in rows)
    br, cr, dr = b.flip(1), c.flip(1), d.flip(1)
    bt, ct, dt = b.T.flip(1), c.T.flip(1), d.T.flip(1)
    blocks = [[a, br, cr, dr], [-br, a, dt, -ct], [-cr, -dt, a, bt], [-dr, ct, -bt, a]]
    return torch.cat([torch.cat(row, 1) for row in blocks])


def _is_base(order: int) -> bool:
    return _paley(order) is not None or (order % 4 == 0 and order // 4 in SUPPLEMENTARY)


@lru_cache(maxsize=64)
def _base(order: int) -> Tensor:
    """A matrix of this order that is no Kronecker product of smaller ones, int8."""
    if order % 4 == 0 and order // 4 in SUPPLEMENTARY:
        return _goethals_seidel(order // 4)
    q, kind = _paley(order) or (0, 0)
    assert kind, order
    elements, chi = _quadratic_character(q)
    p = (_prime_power(q) or (0, 0))[0]
    core = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    core[0, 1:] = 1
    core[1:, 0] = -1 if kind == 1 else 1
    for (i, a), (j, b) in product(enumerate(elements, 1), enumerate(elements, 1)):
        core[i, j] = chi[tuple((x - y) % p for x, y in zip(a, b, strict=True))]
    eye = torch.eye(q + 1, dtype=torch.int8)
    if kind == 1:
        return core + eye
    off_diagonal = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(core, off_diagonal) + torch.kron(eye, diagonal)


def _bases(multiple: int, largest: int) -> list[tuple[int, ...]]:
    """Every non-increasing tuple of base orders whose odd parts multiply to `multiple`'s."""
    if multiple == 1:
        return [()]
    found = []
    for odd in range(3, multiple + 1, 2):
        if multiple % odd:
            continue
        order = 4 * odd
        while order <= min(largest, MAX_BASE):
            if _is_base(order):
                found += [(order, *rest) for rest in _bases(multiple // odd, order)]
                break  # a larger base of the same odd part only costs more
            order *= 2
    return found


@lru_cache(maxsize=1024)
def hadamard_factors(n: int) -> tuple[int, ...]:
    """The Kronecker factors of quantrot's Hadamard matrix of order n: base orders, then the power of two.

    576 -> (36, 16); 4096 -> (4096,); 29568 -> (44, 28, 12, 2). Raises ValueError where no construction is known, naming
    the largest block that divides n and works.
    """
    factors = _factors(n)
    if factors is None:
        raise ValueError(
            f"no Hadamard matrix of order {n} can be constructed here (known: 2^m, and K * 2^m for products of Paley "
            f"orders K <= {MAX_BASE} and 172). Use blocks: the largest that divides {n} is {largest_block(n)} (`block: "
            f"{largest_block(n)}`)."
        )
    return factors


def _factors(n: int) -> tuple[int, ...] | None:
    if n < 1:
        return None
    power = n & -n
    fits = [b for b in _bases(n // power, MAX_BASE) if n % _product(b) == 0]
    if not fits:
        return None
    best = min(fits, key=lambda b: (sum(b) + FACTOR_COST * len(b) + SPLIT_COST * (len(b) > 1), b))
    return (*best, n // _product(best))


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def largest_block(n: int) -> int:
    """The largest divisor of n for which `hadamard_factors` succeeds (1 for odd n)."""
    return next(b for b in range(n, 0, -1) if n % b == 0 and _factors(b) is not None)


@lru_cache(maxsize=16)
def sylvester(n: int) -> Tensor:
    """Sylvester's Hadamard matrix of order n, a power of two: int8 [n, n], H[i, j] = (-1)^popcount(i & j)."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"Sylvester's construction needs a power of two, got {n}")
    h = torch.ones(1, 1, dtype=torch.int8)
    step = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    while h.shape[0] < n:
        h = torch.kron(step, h)
    return h


def hadamard_base(order: int) -> Tensor:
    """One factor of `hadamard_factors` as int8 [order, order]: Sylvester's for a power of two."""
    return sylvester(order) if order & (order - 1) == 0 else _base(order)


def hadamard(n: int) -> Tensor:
    """quantrot's Hadamard matrix of order n, unnormalised +-1, int8 [n, n]; its transpose differs for Paley I bases."""
    h = torch.ones(1, 1, dtype=torch.int8)
    for factor in hadamard_factors(n):
        h = torch.kron(h, hadamard_base(factor))
    return h


# --- Randomness ------------------------------------------------------------------------------------------------------


def random_signs(n: int, seed: int) -> Tensor:
    """n signs, +1 or -1, int8 [n]: the bits of SHAKE-256 of the seed, so equal on every machine and version."""
    digest = hashlib.shake_256(f"quantrot signs {seed}".encode()).digest((n + 7) // 8)
    raw = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    bits = (raw.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return (1 - 2 * bits.to(torch.int8)).flatten()[:n]


def random_orthogonal(n: int, seed: int) -> Tensor:
    """A Haar-distributed orthogonal matrix, float64 [n, n]: Q of a Gaussian's QR, columns signed so that R_ii > 0.

    One LAPACK thread, so that the bytes do not depend on how many there are. Mezzadri 2007, arXiv:math-ph/0609050.
    """
    digest = hashlib.shake_256(f"quantrot normal {seed}".encode()).digest(8 * n * n)
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    uniform = ((words >> 11) & ((1 << 53) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    gaussian = torch.special.ndtri(uniform).view(n, n)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, r = torch.linalg.qr(gaussian)
    finally:
        torch.set_num_threads(threads)
    return q * r.diagonal().sign()
