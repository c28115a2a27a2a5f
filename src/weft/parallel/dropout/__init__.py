"""Dropout that is the same under every plan: it depends on positions, not on ranks."""

from __future__ import annotations

from weft.parallel.dropout.dropping import FunctionalDropout, drops_of, follow_positions, hold_dropped_attention
from weft.parallel.dropout.drops import MARK, Drops, FixedDraws, marked_samples

__all__ = [
    "MARK",
    "Drops",
    "FixedDraws",
    "FunctionalDropout",
    "drops_of",
    "follow_positions",
    "hold_dropped_attention",
    "marked_samples",
]
