"""Layers that techniques put into models: whose weight gradients may wait, in the place of what a rank lacks, and what
embeddings and heads may be given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "HeldGradients",
    "HeldProduct",
    "HoldingLayer",
    "StandIn",
    "check_labels",
    "linear",
    "watch_indices",
]

if TYPE_CHECKING:
    from weft.parallel.layers.held import HeldGradients, HeldProduct, HoldingLayer, linear
    from weft.parallel.layers.index_check import check_labels, watch_indices
    from weft.parallel.layers.stand_in import StandIn

__getattr__ = loads(
    __name__,
    {
        "HeldGradients": ".held",
        "HeldProduct": ".held",
        "HoldingLayer": ".held",
        "StandIn": ".stand_in",
        "check_labels": ".index_check",
        "linear": ".held",
        "watch_indices": ".index_check",
    },
)
