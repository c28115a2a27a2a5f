"""Which elements of a whole array lie where: pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Box",
    "BoxView",
    "Deal",
    "Part",
    "deal_out",
    "meet",
]

if TYPE_CHECKING:
    from weft.checkpoint.parts.part import Box, BoxView, Deal, Part, deal_out, meet

__getattr__ = loads(
    __name__,
    {
        "Box": ".part",
        "BoxView": ".part",
        "Deal": ".part",
        "Part": ".part",
        "deal_out": ".part",
        "meet": ".part",
    },
)
