"""Layers that techniques put into models: whose weight gradients may wait, and in the place of what a rank lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "HeldGradients",
    "HeldProduct",
    "HoldingLayer",
    "StandIn",
    "linear",
]

if TYPE_CHECKING:
    from weft.parallel.layers.held import HeldGradients, HeldProduct, HoldingLayer, linear
    from weft.parallel.layers.stand_in import StandIn

__getattr__ = loads(
    __name__,
    {
        "HeldGradients": ".held",
        "HeldProduct": ".held",
        "HoldingLayer": ".held",
        "StandIn": ".stand_in",
        "linear": ".held",
    },
)
