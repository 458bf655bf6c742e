"""Perplexity by GPTQ's protocol: non-overlapping windows, each predicting its own seq_len - 1 tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from quantrot.evals.logits import Count, next_token_logits
from quantrot.evals.statistics import mean_and_stderr


@dataclass(frozen=True)
class Perplexity:
    """ppl = exp(nll); nll is in nats per predicted token.

    Standard errors take a window as one observation, because neighbouring tokens are correlated; None for one window.
    """

    ppl: float
    ppl_stderr: float | None
    nll: float
    nll_stderr: float | None
    tokens: int
    windows: int
    seq_len: int


def perplexity(
    model: Any, windows: torch.Tensor, progress: Count | None = None, chunk: int | None = None
) -> Perplexity:
    """Perplexity of `model` on `windows` (int64 [n, seq_len]), one window at a time.

    `progress(done, total)` is called after each window; `chunk` bounds the float32 logits held, in tokens.
    """
    losses = []
    for done, ids in enumerate(windows, start=1):
        losses.append(_window_nll(model, ids, chunk))
        if progress:
            progress(done, len(windows))
    nll, stderr = mean_and_stderr(losses)
    ppl = safe_exp(nll)
    n, seq_len = windows.shape
    return Perplexity(ppl, None if stderr is None else ppl * stderr, nll, stderr, n * (seq_len - 1), n, seq_len)


def safe_exp(nll: float) -> float:
    """exp(nll), inf instead of OverflowError: a broken model must be reported, not crash the report."""
    return math.inf if nll > 709 else math.exp(nll)


def _window_nll(model: Any, ids: torch.Tensor, chunk: int | None) -> float:
    """Mean negative log-likelihood of ids[1:], summed in float64."""
    total, start = 0.0, 1
    for logits in next_token_logits(model, ids, chunk):
        targets = ids[start : start + len(logits)].to(logits.device)
        total += F.cross_entropy(logits, targets, reduction="none").double().sum().item()
        start += len(logits)
    return total / (len(ids) - 1)
