"""What a run tells people in words: how it begins and ends, that a rank waits, what more steps do to the rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Ending",
    "Voice",
    "already_done",
    "closing_lines",
    "explained_lines",
    "opening_lines",
    "rate_change",
    "rate_state",
    "seen_digests",
    "with_setting",
]

if TYPE_CHECKING:
    from weft.train.run.telling.explained_step import explained_lines, seen_digests
    from weft.train.run.telling.rates import rate_change, rate_state
    from weft.train.run.telling.summary import Ending, already_done, closing_lines, opening_lines, with_setting
    from weft.train.run.telling.voice import Voice

__getattr__ = loads(
    __name__,
    {
        "Ending": ".summary",
        "Voice": ".voice",
        "already_done": ".summary",
        "closing_lines": ".summary",
        "explained_lines": ".explained_step",
        "opening_lines": ".summary",
        "rate_change": ".rates",
        "rate_state": ".rates",
        "seen_digests": ".explained_step",
        "with_setting": ".summary",
    },
)
