"""Which cases of a product of settings run: each value once in `make test`, the whole product in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def product(names: str, *values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Arguments of `pytest.mark.parametrize`: cases outside of a cover of all single values are marked `full`.

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
