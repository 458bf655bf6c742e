"""How far a model is from a baseline on the same tokens: KL, top-1 agreement, perplexity ratio, logit error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from quantrot.evals.logits import Count, default_chunk, next_token_logits, text_config
from quantrot.evals.perplexity import safe_exp
from quantrot.evals.statistics import mean_and_stderr


@dataclass(frozen=True)
class Divergence:
    """Means over predicted tokens; standard errors take a window as one observation (None for one window).

    kl is KL(baseline || model) in nats per token; top1 the share of tokens with the same most likely next token;
    max_logit_error is max |model - baseline| / max |baseline| over every logit.
    """

    kl: float
    kl_stderr: float | None
    top1: float
    top1_stderr: float | None
    ppl: float
    baseline_ppl: float
    ppl_ratio: float
    ppl_ratio_stderr: float | None
    max_logit_error: float
    tokens: int
    windows: int
    seq_len: int


@dataclass(frozen=True)
class TokenDivergence:
    """One piece of tokens: kl float32 [n] in nats, agree bool [n], and the two maxima of the logit error."""

    kl: torch.Tensor
    agree: torch.Tensor
    max_error: float
    max_baseline: float


@torch.no_grad()
def logit_divergence(baseline: torch.Tensor, model: torch.Tensor) -> TokenDivergence:
    """Compare two models' logits [n, vocab] for the same n tokens; the arithmetic is float32."""
    assert baseline.shape == model.shape
    expected, actual = baseline.float(), model.to(baseline.device).float()
    log_p, log_q = F.log_softmax(expected, dim=-1), F.log_softmax(actual, dim=-1)
    return TokenDivergence(
        kl=F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1),
        agree=expected.argmax(dim=-1) == actual.argmax(dim=-1),
        max_error=(actual - expected).abs().max().item(),
        max_baseline=expected.abs().max().item(),
    )


def divergence(
    model: Any, baseline: Any, windows: torch.Tensor, progress: Count | None = None, chunk: int | None = None
) -> Divergence:
    """Run both models over `windows` (int64 [n, seq_len]), one window at a time.

    `progress(done, total)` is called after each window; `chunk` bounds the float32 logits held, in tokens.
    Raises ValueError where the vocabularies differ.
    """
    sizes = [text_config(m).vocab_size for m in (baseline, model)]
    if sizes[0] != sizes[1]:  # the tokens are the model's, and a smaller baseline could not look them up
        raise ValueError(
            f"baseline: its vocabulary has {sizes[0]} tokens, the model's {sizes[1]}; "
            "compare a model with the checkpoint that it was made from"
        )
    rows = chunk or default_chunk(model, baseline)  # one for both: pieces must hold the same tokens
    pairs = (
        zip(next_token_logits(baseline, ids, rows), next_token_logits(model, ids, rows), strict=True) for ids in windows
    )
    return mean_divergence(pairs, windows, progress)


@torch.no_grad()
def mean_divergence(
    pairs: Iterable[Iterable[tuple[torch.Tensor, torch.Tensor]]], windows: torch.Tensor, progress: Count | None = None
) -> Divergence:
    """The same of logits that are there: for each of the windows int64 [n, seq_len], pieces of (baseline's, model's)
    float32 logits [tokens, vocab] that predict all but its first token, in order."""
    seen = []
    for ids, pieces in zip(windows, pairs, strict=True):
        seen.append(_window(pieces, ids))
        if progress:
            progress(len(seen), len(windows))
    kl, kl_stderr = mean_and_stderr([w.kl for w in seen])
    top1, top1_stderr = mean_and_stderr([w.agree for w in seen])
    log_ratio, log_ratio_stderr = mean_and_stderr([w.nll - w.baseline_nll for w in seen])
    ratio = safe_exp(log_ratio)
    n, seq_len = windows.shape
    return Divergence(
        kl=kl,
        kl_stderr=kl_stderr,
        top1=top1,
        top1_stderr=top1_stderr,
        ppl=safe_exp(mean_and_stderr([w.nll for w in seen])[0]),
        baseline_ppl=safe_exp(mean_and_stderr([w.baseline_nll for w in seen])[0]),
        ppl_ratio=ratio,
        ppl_ratio_stderr=None if log_ratio_stderr is None else ratio * log_ratio_stderr,
        max_logit_error=_largest([w.max_error for w in seen]) / (_largest([w.max_baseline for w in seen]) or 1.0),
        tokens=n * (seq_len - 1),
        windows=n,
        seq_len=seq_len,
    )


@dataclass(frozen=True)
class _Window:
    """Per-token means of one window, and its maxima."""

    kl: float
    agree: float
    nll: float
    baseline_nll: float
    max_error: float
    max_baseline: float


def _window(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor) -> _Window:
    sums = torch.zeros(4, dtype=torch.float64)
    max_error, max_baseline, start = [], [], 1
    for expected, actual in pieces:
        piece = logit_divergence(expected, actual)
        targets = ids[start : start + len(expected)]
        nll = F.cross_entropy(actual, targets.to(actual.device), reduction="none")
        baseline_nll = F.cross_entropy(expected, targets.to(expected.device), reduction="none")
        sums += torch.stack([x.double().sum().cpu() for x in (piece.kl, piece.agree, nll, baseline_nll)])
        max_error.append(piece.max_error)
        max_baseline.append(piece.max_baseline)
        start += len(expected)
    kl, agree, nll_mean, baseline_mean = (sums / (len(ids) - 1)).tolist()
    return _Window(kl, agree, nll_mean, baseline_mean, _largest(max_error), _largest(max_baseline))


def _largest(values: list[float]) -> float:
    """The maximum, NaN if any is NaN (Python's max() would hide it)."""
    return torch.tensor(values, dtype=torch.float64).max().item()
