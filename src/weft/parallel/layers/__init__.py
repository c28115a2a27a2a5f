"""Layers that techniques put into models: whose weight gradients may wait, in the place of what a rank lacks, what
embeddings and heads may be given, and products in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Float8",
    "HeldGradients",
    "HeldProduct",
    "HoldingLayer",
    "StandIn",
    "attend_by_borders",
    "check_labels",
    "choose_float8",
    "linear",
    "product",
    "refuse_partial",
    "use_float8",
    "watch_indices",
]

if TYPE_CHECKING:
    from weft.parallel.layers.float8 import Float8, product
    from weft.parallel.layers.float8_layers import choose_float8, refuse_partial, use_float8
    from weft.parallel.layers.held import HeldGradients, HeldProduct, HoldingLayer, linear
    from weft.parallel.layers.index_check import check_labels, watch_indices
    from weft.parallel.layers.picture_attention import attend_by_borders
    from weft.parallel.layers.stand_in import StandIn

__getattr__ = loads(
    __name__,
    {
        "Float8": ".float8",
        "HeldGradients": ".held",
        "HeldProduct": ".held",
        "HoldingLayer": ".held",
        "StandIn": ".stand_in",
        "attend_by_borders": ".picture_attention",
        "check_labels": ".index_check",
        "choose_float8": ".float8_layers",
        "linear": ".held",
        "product": ".float8",
        "refuse_partial": ".float8_layers",
        "use_float8": ".float8_layers",
        "watch_indices": ".index_check",
    },
)
