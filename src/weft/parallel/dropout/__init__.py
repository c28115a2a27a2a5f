"""Dropout that is the same under every plan: what is dropped depends on where it is, not on who has it."""

from __future__ import annotations

from weft.parallel.dropout.dropping import FunctionalDropout, drops_of, follow_positions, hold_dropped_attention
from weft.parallel.dropout.drops import Drops, FixedDraws

__all__ = ["Drops", "FixedDraws", "FunctionalDropout", "drops_of", "follow_positions", "hold_dropped_attention"]
