"""What is followed through a forward: the tokens of a sequence, and sizes of divided dims."""

from weft.structure.tracing.counted_sizes import (
    CONSTANTS,
    RESHAPES,
    Counted,
    counted_in,
    counted_result,
    fits_parts,
)
from weft.structure.tracing.token_trace import TokenDivision, TokenRegions, TokenTrace, hidden_place

__all__ = [
    "CONSTANTS",
    "RESHAPES",
    "Counted",
    "TokenDivision",
    "TokenRegions",
    "TokenTrace",
    "counted_in",
    "counted_result",
    "fits_parts",
    "hidden_place",
]
