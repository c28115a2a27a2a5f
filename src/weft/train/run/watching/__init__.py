"""Figures of every rank while it trains, and what people, pages and alerts ask of the run."""

from __future__ import annotations

from weft.train.run.watching.figure_hook import FigureHook
from weft.train.run.watching.rolled_back import roll_back
from weft.train.run.watching.wish_watch import WishWatch

__all__ = ["FigureHook", "WishWatch", "roll_back"]
