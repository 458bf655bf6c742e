"""Few of many kernels: all are compiled on machines with a GPU, elsewhere so many that every value of every field is
among them, which takes a third of the time."""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass

import pytest


def values(case: tuple, without: tuple[str, ...]) -> set:
    """What a case of plans and numbers has in each field and place; cases whose first are of two kinds share none."""
    found: set = set()
    for place, part in enumerate(case):
        fields = vars(part) if is_dataclass(part) else {place: part}
        found |= {(type(case[0]), type(part), name, value) for name, value in fields.items() if name not in without}
    return found


def few(cases: Iterable[tuple], without: tuple[str, ...] = ()) -> list[tuple]:
    """Those that have every value of every field but those: one after another who has most that no one had."""
    cases, found = list(cases), []
    left = set().union(*(values(case, without) for case in cases))
    while left:
        found.append(max(cases, key=lambda case: len(values(case, without) & left)))
        left -= values(found[-1], without)
    return found


def every(cases: Iterable[tuple], without: tuple[str, ...] = ()) -> list[tuple]:
    return list(cases)


def names(chosen: Callable[[Iterable[tuple]], list[tuple]], cases: dict[str, tuple]) -> list[str]:
    """Of the cases that `few` or `every` chooses."""
    kept = chosen(cases.values())
    return [name for name, case in cases.items() if case in kept]


few_or_every = pytest.mark.parametrize("chosen", [few, pytest.param(every, marks=pytest.mark.gpu)])
