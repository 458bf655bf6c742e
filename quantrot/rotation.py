"""Rotations as exact operations on weights: fold a norm's gain, turn an input side, turn an output side.

A rotation of width n is an orthogonal matrix R = P diag(signs) blockdiag(Q, Q, ...), with Q a normalised Hadamard or a
random orthogonal matrix of order `block` and P a permutation, usually none. A learned one has a Q of its own for every
block and no signs. Blocks past `turned` are left as they are.
A row vector x becomes x R. So that a network's function stays,

    a linear that reads x R:  W -> W R      (its input side)       y = (x R)(W R)^T = x W^T
    a linear that writes y R: W -> R^T W    (its output side)      x (R^T W)^T = (x W^T) R

A side longer than the width (heads side by side) is turned width by width. QuaRot, arXiv:2404.00456.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels.hadamard import hadamard_transform
from quantrot.orthogonal import (
    RotationKind,
    hadamard,
    hadamard_base,
    hadamard_factors,
    largest_block,
    random_orthogonal,
    random_signs,
)
from quantrot.recipe import RotationSpec

DENSE = ("random-orthogonal", "learned")  # kinds that are no Hadamard matrices
UNLIKE = 0.5  # spread of log gains within a block, past which it is left alone; a quarter of that is usual
SMALL = 64  # blocks up to this are a product with their matrix on a CPU
SLAB = 1 << 20  # elements of a transposed slab in `turn_output`: 4 MB in float32, so it stays in cache


@dataclass(frozen=True)
class Rotation:
    """A rotation by name; its matrix is regenerated from these values, never stored, unless it is learned."""

    name: str
    kind: RotationKind
    width: int
    block: int
    seed: int
    permutation: bytes = b""  # int32, column j of x P is column permutation[j] of x; empty for none
    turned: int = -1  # how many leading columns of x P are turned, whole blocks; -1 for all
    # of a learned one: float32 [units, width / block, block, block], a unit for each layer and head
    matrices: bytes = field(default=b"", repr=False)

    @property
    def extent(self) -> str:
        """How much of the side a block is, and how much is turned if not all, in words."""
        block = "full width" if self.block == self.width else f"blocks of {self.block}"
        return block if self.turned in (-1, self.width) else f"{block}, {self.turned} of {self.width} channels turned"


def rotation_from_spec(name: str, spec: RotationSpec, width: int) -> Rotation | None:
    """The recipe's rotation on a side of this width; None for kind none. ValueError if the block does not fit."""
    if spec.kind == "none":
        return None
    block = _block(name, spec.block, width)
    if spec.kind not in DENSE:
        try:
            hadamard_factors(block)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return Rotation(name, spec.kind, width, block, spec.seed)


def _block(name: str, wanted: int | str, width: int) -> int:
    """The block's width that a recipe asks for on a side of this width."""
    if wanted == "full":
        return width
    if isinstance(wanted, str):
        limit = int(wanted.removeprefix("<="))
        block = next((b for b in range(min(limit, width), 1, -1) if width % b == 0 and largest_block(b) == b), 0)
        if not block:
            raise ValueError(f"{name}.block is {wanted}, and no Hadamard block up to {limit} divides the width {width}")
        return block
    if width % wanted:
        raise ValueError(f"{name}.block is {wanted}, which does not divide the width {width}; use a divisor, or full")
    return wanted


def by_gain(rotation: Rotation, gains: Tensor) -> Rotation:
    """The same rotation with the channels ordered so that each block holds those whose gains are alike, and not turning
    blocks in which they are not.

    gains: float [norms, width], of every norm that is folded. Folding a gain takes it from the activations: within a
    block, a channel that a small gain kept small then sets the scale of its neighbours. Where all gains of a block are
    alike, the fold only rescales the block, which a block-scaled format does not notice. Channels are halved along
    the principal component of their log gains until a half is one block. What is left over,
    channels unlike all others, often those of massive activations, comes last and keeps its gains. docs/rotations.md
    has what it is worth.
    """
    logs = gains.double().abs().clamp_min(1e-6).log().T
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the order does not depend on how many there are
    try:
        order = _halve(logs, torch.arange(rotation.width), rotation.block).view(-1, rotation.block)
    finally:
        torch.set_num_threads(threads)
    spread = logs[order].std(1, correction=min(1, rotation.block - 1)).mean(-1)
    alike, unlike = order[spread <= UNLIKE], order[spread > UNLIKE]
    permutation = torch.cat([alike, unlike]).flatten().to(torch.int32).numpy().tobytes()
    return replace(rotation, permutation=permutation, turned=alike.numel())


def _halve(logs: Tensor, channels: Tensor, block: int) -> Tensor:
    """The channels, split into blocks along their first principal components."""
    if len(channels) <= block:
        return channels
    centred = logs[channels] - logs[channels].mean(0)
    axis = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    axis = axis * axis[axis.abs().argmax()].sign()
    order = channels[(centred @ axis).to(torch.float32).argsort(stable=True)]
    first = (len(channels) // block + 1) // 2 * block
    return torch.cat([_halve(logs, order[:first], block), _halve(logs, order[first:], block)])


def permutation(rotation: Rotation) -> Tensor:
    """Column j of x P is this column of x, int64 [width]."""
    return torch.frombuffer(bytearray(rotation.permutation), dtype=torch.int32).long()


def split_gain(gain: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """(what folds into the columns of the linears that read the norm, what stays in the norm), both [width].

    The first is in the source's order of channels, the second in the rotation's. Where nothing is turned a gain stays.
    """
    if rotation.turned < 0:
        return gain, torch.ones_like(gain)
    order = permutation(rotation).to(gain.device)
    folds, stays = gain.clone(), gain[order]
    folds[order[rotation.turned :]] = 1
    stays[: rotation.turned] = 1
    return folds, stays


@lru_cache(maxsize=8)
def _orthogonal(order: int, seed: int) -> Tensor:
    return random_orthogonal(order, seed).to(torch.float32)


@lru_cache(maxsize=32)
def signs(rotation: Rotation) -> Tensor | None:
    """The rotation's signs, int8 [width], or None where it has none."""
    return random_signs(rotation.width, rotation.seed) if rotation.kind == "random-hadamard" else None


def checksum(rotation: Rotation) -> str:
    """sha256 over what determines the matrix: its base matrices or its entries, and its signs."""
    digest = hashlib.sha256(f"{rotation.kind} {rotation.width} {rotation.block}".encode())
    if rotation.kind == "learned":
        digest.update(rotation.matrices)
    elif rotation.kind == "random-orthogonal":
        digest.update(_orthogonal(rotation.block, rotation.seed).numpy().tobytes())
    else:
        for factor in hadamard_factors(rotation.block):
            digest.update(hadamard_base(factor).numpy().tobytes() if factor & (factor - 1) else f"S{factor}".encode())
    s = signs(rotation)
    if s is not None:
        digest.update(s.numpy().tobytes())
    digest.update(rotation.permutation + (str(rotation.turned).encode() if rotation.turned >= 0 else b""))
    return digest.hexdigest()


def turn_input(x: Tensor, rotation: Rotation, start: int = 0) -> Tensor:
    """x R over the last dimension, whose elements are columns start, start + 1, ... of the whole side.

    x: [..., m] float32 or float64, m and start multiples of the block. Also what an activation or a bias needs.
    """
    if rotation.permutation:
        assert start == 0 and x.shape[-1] == rotation.width, "a permuted side is turned whole"
        x = x.index_select(-1, permutation(rotation).to(x.device))  # a fifth of the time of indexing
    if rotation.turned == 0 and rotation.permutation:  # by gain, and no block was alike
        return x
    if 0 <= rotation.turned < x.shape[-1]:
        left = replace(rotation, permutation=b"", turned=-1)
        return torch.cat([turn_input(x[..., : rotation.turned], left), x[..., rotation.turned :]], dim=-1)
    s = _signs_from(rotation, start, x.shape[-1], x)
    if _is_product(rotation, x):
        turned = x if s is None else x * s
        blocks = turned.unflatten(-1, (-1, rotation.block))
        if rotation.kind == "learned":
            return torch.einsum("...nb,nbc->...nc", blocks, _own_blocks(rotation, start, x.shape[-1], x)).flatten(-2)
        return (blocks @ _block_matrix(rotation).to(x)).flatten(-2)
    return hadamard_transform(x, block=rotation.block, signs=s)


def _signs_from(rotation: Rotation, start: int, count: int, like: Tensor) -> Tensor | None:
    """The signs of `count` columns of the whole side from `start` on, as `like`'s dtype and device."""
    s = signs(rotation)
    return None if s is None else s[torch.arange(start, start + count) % rotation.width].to(like)


def _is_product(rotation: Rotation, x: Tensor) -> bool:
    """Whether a block is turned by a product with its matrix: on a CPU up to 64, 0.7 against 3 ns an element."""
    return rotation.kind in DENSE or (x.device.type == "cpu" and rotation.block <= SMALL)


@lru_cache(maxsize=32)
def _block_matrix(rotation: Rotation) -> Tensor:
    """Q, float32 [block, block]."""
    if rotation.kind == "random-orthogonal":
        return _orthogonal(rotation.block, rotation.seed)
    return hadamard(rotation.block).to(torch.float32) / rotation.block**0.5


@lru_cache(maxsize=32)
def _learned(rotation: Rotation) -> Tensor:
    """Every block of every unit, float32 [n, block, block]."""
    return torch.frombuffer(bytearray(rotation.matrices), dtype=torch.float32).view(-1, rotation.block, rotation.block)


def _own_blocks(rotation: Rotation, start: int, count: int, like: Tensor) -> Tensor:
    """The matrices of `count` columns of the whole side from `start` on, as `like`'s dtype and device."""
    q, first, n = _learned(rotation), start // rotation.block, count // rotation.block
    return (q if (first, n) == (0, len(q)) else q[torch.arange(first, first + n) % len(q)]).to(like)


def of_heads(rotation: Rotation, layer: int, heads: int, repeat: int = 1) -> Rotation:
    """R2 on a layer's heads side by side; a learned one has matrices for each, `repeat` heads in turn share theirs."""
    if rotation.kind != "learned":
        return rotation
    units = _learned(rotation).unflatten(0, (-1, heads, rotation.width // rotation.block))
    mine = units[layer].repeat_interleave(repeat, 0)
    return replace(rotation, width=rotation.width * heads * repeat, matrices=mine.numpy().tobytes())


def block_matrices(rotation: Rotation) -> Tensor:
    """Every block with its signs, float64 [n, block, block]; of a learned rotation, every unit's."""
    if rotation.kind == "learned":
        return _learned(rotation).double()
    blocks = _block_matrix(rotation).double().expand(rotation.width // rotation.block, -1, -1)
    s = signs(rotation)
    return blocks if s is None else blocks * s.view(-1, rotation.block, 1)


def turn_output(w: Tensor, rotation: Rotation, start: int = 0) -> Tensor:
    """R^T w over the first dimension of w [m, K], overwriting w; its rows are rows start, start + 1, ... of the side.

    By slabs of rows or columns, so that what is made on the way stays small next to w.
    """
    if not rotation.permutation and _is_product(rotation, w):
        s = _signs_from(rotation, start, w.shape[0], w)
        if s is not None:
            w.mul_(s.unsqueeze(1))
        blocks = w.view(-1, rotation.block, w.shape[1])
        size = max(1, SLAB // max(blocks[:1].numel(), 1))
        if rotation.kind == "learned":
            own = _own_blocks(rotation, start, w.shape[0], w)
            for q, some in zip(own.split(size), blocks.split(size), strict=True):
                some.copy_(q.mT @ some)
            return w
        h = _block_matrix(rotation).to(w).T
        for some in blocks.split(size):
            some.copy_(h @ some)
        return w
    if rotation.permutation:
        assert start == 0 and w.shape[0] == rotation.width, "a permuted side is turned whole"
        order = permutation(rotation).to(w.device)
        count = rotation.turned if rotation.turned >= 0 else rotation.width
        turned = w[order]
        if count:
            turn_output(turned[:count], replace(rotation, permutation=b"", turned=-1))
        return turned
    columns = max(1, SLAB // max(w.shape[0], 1))
    for first in range(0, w.shape[1], columns):
        slab = w[:, first : first + columns]
        slab.copy_(turn_input(slab.T.contiguous(), rotation, start).T)
    return w
