"""Conditions over figures, as the grammar reads them: one class for each kind."""

from __future__ import annotations

from weft.spec.figures.conditions.kinds import (
    EVENTS,
    Any_,
    Compare,
    Condition,
    Every,
    Happened,
    Missing,
    Operator,
    RunSpan,
    Series,
    State,
    Stuck,
    Trend,
    simple_parts,
)

__all__ = [
    "EVENTS",
    "Any_",
    "Compare",
    "Condition",
    "Every",
    "Happened",
    "Missing",
    "Operator",
    "RunSpan",
    "Series",
    "State",
    "Stuck",
    "Trend",
    "simple_parts",
]
