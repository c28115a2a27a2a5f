"""Published runs against predictions: how far the planner is off."""

from __future__ import annotations

from weft.planner.scoring.scores import SCORE_TIERS, ScoreReport, score

__all__ = [
    "SCORE_TIERS",
    "ScoreReport",
    "score",
]
