"""Selection of the cases of a test that `make test` runs. The others are marked `full` and run in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import pytest


def product(names: str, *values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return arguments of `pytest.mark.parametrize`: cases outside a cover of all single values are marked `full`.

    names: as for parametrize. values: one sequence for each name.
    """
    rows = max(map(len, values))
    # Different strides keep two settings of equal length from varying together.
    cover = {
        tuple(axis[(row + row // len(axis) * number) % len(axis)] for number, axis in enumerate(values))
        for row in range(rows)
    }
    cases = [
        pytest.param(*case, marks=() if case in cover else pytest.mark.full) for case in itertools.product(*values)
    ]
    return names, cases


def gate_runs(values: Iterable[Any], *places: int) -> list[Any]:
    """Return the values as parameters of a test, with all except those at `places` marked `full`.

    Args:
        values: one for each case; a tuple has the values of several parameters.
        *places: indices of the cases that the gate runs, from 0: those that no other test of the gate covers.
    """
    cases = list(values)
    chosen = {range(len(cases))[place] for place in places}  # an invalid index is an IndexError
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if place in chosen else pytest.mark.full)
        for place, one in enumerate(cases)
    ]


def todays(values: Iterable[Any], *, parts: int = 3) -> list[Any]:
    """Return the values as parameters of a test, with all except today's part marked `full`.

    Each day has another part, so the gate runs every case within a few days, and the nightly run has all.

    Args:
        values: one for each case; a tuple has the values of several parameters. A `pytest.param` keeps its marks.
        parts: number of parts.
    """
    given = [
        one if hasattr(one, "marks") else pytest.param(*(one if isinstance(one, tuple) else (one,))) for one in values
    ]
    cases = [place for place, one in enumerate(given) if not one.marks]
    today = date.today().toordinal()
    later = {place for row, place in enumerate(cases) if (row - today) % min(parts, len(cases))}
    return [
        pytest.param(*one.values, id=one.id, marks=pytest.mark.full) if place in later else one
        for place, one in enumerate(given)
    ]
