"""GPTQ: weights rounded so that their errors cancel on the inputs that a linear is known to see.

Inputs X [tokens, K] have the Hessian H = X^T X. With it, the errors e = w - q of a row of weights cost the output

    |X e|^2 = e H e^T = e F D F^T e^T = sum over k of D_k (e_k + sum over j < k of e_j F_jk)^2

where H = F D F^T, F unit upper triangular, D diagonal. So columns are rounded one after the other, column k to what is
nearest to w_k + sum over j < k of e_j F_jk: each takes up what the ones before it left over. One Cholesky
decomposition, and no inverse, gives F. The columns with the largest inputs come first, when little is left over. Rows
do not know of each other, nor do scales of roundings: those are the recipe's, of the weight that is rounded.

Once all are rounded, each column can make up for those after it, too: with all others as they are, the least cost is
that of column k rounded to what is nearest to q_k + sum over j of e_j H_jk / H_kk. SWEEPS passes over all columns do
this, and never cost more.

The inputs X are the converted model's. To round for the outputs that the original's inputs would have (GPTAQ, QEP)
helps models of 15 and 135 million weights, and one of 1.5 billion loses on other text (docs/measured/accuracy.md).

GPTQ is arXiv:2210.17323; that it is this recurrence, QuIP's (arXiv:2307.13304); the sweeps are QuantEase's coordinate
descent (arXiv:2309.01885).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantrot import formats
from quantrot.formats import WeightFormat
from quantrot.kernels.gptq import round_columns

DAMPING = 0.01  # of H's mean diagonal, added to the diagonal, at least: so little of every input is taken to be noise
SWEEPS = 2  # a model of 1.5 billion, weights alone: KL 0.0480 without, 0.0425 with one, 0.0418 with two, 0.0416 with 4
BLOCK = 128  # columns whose sums over all columns before the block are one product


class Feedback(NamedTuple):
    """order: int64 [K], in which columns are rounded. Of the columns in this order, float32 [K, K]: factor: F^T, whose
    row k is what column k takes of the errors before it. pull: H, each row divided by its diagonal, whose row k is what
    column k takes of all errors."""

    order: Tensor
    factor: Tensor
    pull: Tensor


def damping_of(columns: int, tokens: float) -> float:
    """What is added to H's diagonal, of its mean: what few tokens show of many columns is mostly chance.

    With fewer tokens than columns a down_proj has an error of 2.12% on another text with 0.01, of 1.64% so; to nearest
    it has 1.88% (docs/measured/accuracy.md).
    """
    return max(DAMPING, columns / (2 * tokens))


def feedback(hessian: Tensor, tokens: float) -> Feedback:
    """Of a Hessian float [K, K], whose upper triangle is read, of so many tokens."""
    mean = hessian.diagonal().double().mean()  # a hundredth of a small float32 could be 0
    damping = damping_of(len(hessian), tokens) * torch.where(mean > 0, mean, 1.0)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    last = order.flip(0)  # backwards, Cholesky's lower triangle is the upper one
    # Indexing by both at once would write out two int64 [K, K] on a GPU.
    h = (hessian.triu() + hessian.triu(1).T).index_select(0, last).index_select(1, last).double()
    del hessian  # a wide one is gigabytes
    while True:
        h.diagonal().add_(damping)
        root, wrong = torch.linalg.cholesky_ex(h)
        if not wrong:
            break
        damping = damping * 10  # H is positive but for the rounding of its sums
    pull = h.div_(h.diagonal().clone()[:, None]).to(torch.float32).flip(0, 1)
    del h
    factor = root.div_(root.diagonal().clone()).to(torch.float32).flip(0, 1).T.contiguous()
    return Feedback(order, factor, pull)


def round_rows(weights: WeightFormat, w: Tensor, by: Feedback, sweeps: int = SWEEPS) -> list[Tensor]:
    """Rows of a weight, float32 [m, K] with m a multiple of the block's rows, to the tensors on disk. With H = I, the
    bits of `formats.quantize_rows` (but for zeros' signs)."""
    scale = formats.quantize_rows(weights, w)[1]
    columns = w.T[by.order]
    step = formats.steps(weights, scale, w.shape).T[by.order]
    error, rounded = torch.zeros_like(columns), torch.empty_like(columns)
    blocks = [slice(start, min(start + BLOCK, len(columns))) for start in range(0, len(columns), BLOCK)]
    for here in blocks:
        targets = torch.addmm(columns[here], by.factor[here, : here.start], error[: here.start])
        rounded[here], error[here] = round_columns(
            targets, columns[here], step[here], by.factor[here, here], weights.kind
        )
    for here in blocks * sweeps:
        before = rounded[here] * step[here]
        targets = torch.addmm(before, by.pull[here], error)
        rounded[here], moved = round_columns(targets, before, step[here], by.pull[here, here], weights.kind)
        error[here] += moved
    rows = torch.empty_like(w).index_copy_(1, by.order, rounded.T)
    return formats.store(weights, rows, scale)
