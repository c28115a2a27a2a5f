"""How far to trust an estimate: bands of time and chances of memory, from the errors on runs that it had not seen."""

from __future__ import annotations

from weft.planner.foresight.bands import (
    LEVELS,
    MEMORY_DOUBTS,
    TIME_DOUBTS,
    Band,
    Doubts,
    Experience,
    fits_chance,
    memory_spread,
    shipped,
    time_bands,
)
from weft.planner.foresight.circumstances import (
    WELL_KNOWN,
    Circumstances,
    circumstances_of,
    generation,
    unmeasured,
)

__all__ = [
    "LEVELS",
    "MEMORY_DOUBTS",
    "TIME_DOUBTS",
    "WELL_KNOWN",
    "Band",
    "Circumstances",
    "Doubts",
    "Experience",
    "circumstances_of",
    "fits_chance",
    "generation",
    "memory_spread",
    "shipped",
    "time_bands",
    "unmeasured",
]
