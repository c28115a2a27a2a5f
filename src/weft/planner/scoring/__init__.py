"""Published runs against predictions: how far the planner is off."""

from weft.planner.scoring.score import Report, score

__all__ = ["Report", "score"]
