"""Collectives that autograd and torch.compile pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "copy_to",
    "exchange",
    "exchange_dims",
    "gather_from",
    "gather_slice",
    "is_join",
    "is_product",
    "max_over",
    "operator_of",
    "prepare_operators",
    "scatter_sum",
    "slice_to",
    "sum_over",
]

if TYPE_CHECKING:
    from weft.comm.autograd.functions import (
        copy_to,
        exchange,
        exchange_dims,
        gather_from,
        gather_slice,
        max_over,
        scatter_sum,
        slice_to,
        sum_over,
    )
    from weft.comm.autograd.operators import is_join, is_product, operator_of, prepare_operators

__getattr__ = loads(
    __name__,
    {
        "copy_to": ".functions",
        "exchange": ".functions",
        "exchange_dims": ".functions",
        "gather_from": ".functions",
        "gather_slice": ".functions",
        "is_join": ".operators",
        "is_product": ".operators",
        "max_over": ".functions",
        "operator_of": ".operators",
        "prepare_operators": ".operators",
        "scatter_sum": ".functions",
        "slice_to": ".functions",
        "sum_over": ".functions",
    },
)
