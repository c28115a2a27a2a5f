"""What a run is measured by: one schema of figures for events, sinks, alerts and the page; conditions over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Condition",
    "FIGURES",
    "Figure",
    "SHORT",
    "STANDARD",
    "RunSpan",
    "StandardAlert",
    "parse_condition",
    "series",
    "simple_parts",
    "split_series",
]

if TYPE_CHECKING:
    from weft.spec.figures.conditions import Condition, RunSpan, simple_parts
    from weft.spec.figures.figure import Figure, series, split_series
    from weft.spec.figures.figure_table import FIGURES, SHORT
    from weft.spec.figures.grammar import parse_condition
    from weft.spec.figures.standard_alerts import STANDARD, StandardAlert

__getattr__ = loads(
    __name__,
    {
        "Condition": ".conditions",
        "FIGURES": ".figure_table",
        "Figure": ".figure",
        "SHORT": ".figure_table",
        "STANDARD": ".standard_alerts",
        "RunSpan": ".conditions",
        "StandardAlert": ".standard_alerts",
        "parse_condition": ".grammar",
        "series": ".figure",
        "simple_parts": ".conditions",
        "split_series": ".figure",
    },
)
