"""Published runs against predictions: how far the planner is off."""

from __future__ import annotations

from weft.planner.scoring.residuals import experience_text
from weft.planner.scoring.scores import SCORE_TIERS, ScoreReport, score

__all__ = [
    "SCORE_TIERS",
    "ScoreReport",
    "experience_text",
    "score",
]
