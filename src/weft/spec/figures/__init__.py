"""What a run is measured by: one schema of figures for events, sinks, alerts and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "FIGURES",
    "Figure",
    "SHORT",
    "series",
    "split_series",
]

if TYPE_CHECKING:
    from weft.spec.figures.figure import Figure, series, split_series
    from weft.spec.figures.figure_table import FIGURES, SHORT

__getattr__ = loads(
    __name__,
    {
        "FIGURES": ".figure_table",
        "Figure": ".figure",
        "SHORT": ".figure_table",
        "series": ".figure",
        "split_series": ".figure",
    },
)
