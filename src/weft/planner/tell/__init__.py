"""What the planner says: why, why not, compare, what if, and what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "TERM_WORDS",
    "Comparison",
    "Scenario",
    "WhyNot",
    "compare",
    "config_text",
    "explain",
    "fit_words",
    "footprint",
    "nearest_yes",
    "report",
    "search",
    "time_by_rung",
    "what_if",
    "whole_runs",
    "why_not",
]

if TYPE_CHECKING:
    from weft.planner.tell import footprint, report
    from weft.planner.tell.basis import time_by_rung
    from weft.planner.tell.comparison import Comparison, compare
    from weft.planner.tell.explained import search
    from weft.planner.tell.explanation import TERM_WORDS, explain, fit_words
    from weft.planner.tell.nearest import nearest_yes
    from weft.planner.tell.scenario import Scenario, what_if
    from weft.planner.tell.verdict import WhyNot, why_not
    from weft.planner.tell.whole_run import whole_runs
    from weft.planner.tell.write_config import config_text

__getattr__ = loads(
    __name__,
    {
        "Comparison": ".comparison",
        "Scenario": ".scenario",
        "TERM_WORDS": ".explanation",
        "WhyNot": ".verdict",
        "compare": ".comparison",
        "config_text": ".write_config",
        "explain": ".explanation",
        "fit_words": ".explanation",
        "nearest_yes": ".nearest",
        "search": ".explained",
        "time_by_rung": ".basis",
        "what_if": ".scenario",
        "whole_runs": ".whole_run",
        "why_not": ".verdict",
    },
)
