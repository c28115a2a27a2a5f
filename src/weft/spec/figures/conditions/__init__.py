"""Conditions over figures, as the grammar reads them: one class for each kind."""

from __future__ import annotations

from weft.spec.figures.conditions.kinds import (
    Any_,
    Compare,
    Condition,
    Every,
    Happened,
    Missing,
    RunSpan,
    Series,
    State,
    Stuck,
    Trend,
    simple_parts,
)

__all__ = [
    "Any_",
    "Compare",
    "Condition",
    "Every",
    "Happened",
    "Missing",
    "RunSpan",
    "Series",
    "State",
    "Stuck",
    "Trend",
    "simple_parts",
]
