"""A run's figures: read on each rank by a thread, folded over the ranks, and taken out of events again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Fold",
    "Reading",
    "fold",
    "readings",
]

if TYPE_CHECKING:
    from weft.monitor.figures.fold import Fold, fold
    from weft.monitor.figures.reading import Reading, readings

__getattr__ = loads(
    __name__,
    {
        "Fold": ".fold",
        "Reading": ".reading",
        "fold": ".fold",
        "readings": ".reading",
    },
)
