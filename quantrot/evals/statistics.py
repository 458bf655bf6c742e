"""Standard errors and the paired test that the evaluations report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Two models on the same n questions. `difference` is model minus baseline, in accuracy.

    `p_value` is McNemar's exact two-sided one: under equal accuracy each question that only one model answers
    (`only_model` + `only_baseline` of them) is a fair coin.
    """

    n: int
    difference: float
    stderr: float | None
    only_model: int
    only_baseline: int
    p_value: float


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (sample deviation / sqrt(n)); None for a single value, which has no spread."""
    assert values
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def paired(model: Sequence[bool], baseline: Sequence[bool]) -> Paired:
    """Compare two models' correctness, question by question."""
    assert len(model) == len(baseline)
    difference, stderr = mean_and_stderr([float(a) - float(b) for a, b in zip(model, baseline, strict=True)])
    only_model = sum(a and not b for a, b in zip(model, baseline, strict=True))
    only_baseline = sum(b and not a for a, b in zip(model, baseline, strict=True))
    return Paired(len(model), difference, stderr, only_model, only_baseline, mcnemar(only_model, only_baseline))


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value of b against c discordant pairs: min(1, 2 P[Binomial(b + c, 1/2) <= min(b, c)])."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers until the last division, so no term underflows
