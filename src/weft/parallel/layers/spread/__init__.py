"""Divides the pictures and clips of a batch by cost over the ranks that would all encode them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["ItemCost", "SpreadChoice", "attach_spread", "choose_spread", "deal_items"]

if TYPE_CHECKING:
    from weft.parallel.layers.spread.choose import SpreadChoice, attach_spread, choose_spread
    from weft.parallel.layers.spread.deal import ItemCost, deal_items

__getattr__ = loads(
    __name__,
    {
        "ItemCost": ".deal",
        "SpreadChoice": ".choose",
        "attach_spread": ".choose",
        "choose_spread": ".choose",
        "deal_items": ".deal",
    },
)
