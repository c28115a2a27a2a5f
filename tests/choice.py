"""Which cases of a test `make test` runs: the others are marked `full` and run in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def product(names: str, *values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Arguments of `pytest.mark.parametrize`: cases outside a cover of all single values are marked `full`.

    names: as parametrize takes them. values: one sequence for each name.
    """
    rows = max(map(len, values))
    # Strides that differ keep two settings of equal length from going in step.
    cover = {
        tuple(axis[(row + row // len(axis) * number) % len(axis)] for number, axis in enumerate(values))
        for row in range(rows)
    }
    cases = [
        pytest.param(*case, marks=() if case in cover else pytest.mark.full) for case in itertools.product(*values)
    ]
    return names, cases


def gate_runs(values: Iterable[Any], *places: int) -> list[Any]:
    """Return the values as parameters of a test, all but those at `places` marked `full`.

    Args:
        values: one for each case; a tuple is the values of several parameters.
        *places: of those that the gate runs, from 0. They are what no other test of the gate shows.
    """
    cases = list(values)
    kept = {range(len(cases))[place] for place in places}  # a place that is not there is an IndexError
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if place in kept else pytest.mark.full)
        for place, one in enumerate(cases)
    ]
