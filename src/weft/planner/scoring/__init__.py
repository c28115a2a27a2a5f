"""Published runs against predictions: how far the planner is off."""

from weft.planner.scoring.scores import SCORE_TIERS, Report, score

__all__ = ["SCORE_TIERS", "Report", "score"]
