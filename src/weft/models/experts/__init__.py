"""A feed-forward layer of experts: the router, its balance, and products with one matrix per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Experts",
    "Load",
    "MoE",
    "Router",
    "Span",
    "attach",
    "combine_rows",
    "count_tokens",
    "grouped_linear",
    "move_bias",
    "permute_rows",
    "routers",
    "sequence_loss",
    "sort_by_expert",
    "spread_rows",
    "told_ends",
]

if TYPE_CHECKING:
    from weft.models.experts.balance import Load, Span, attach, count_tokens, move_bias, sequence_loss
    from weft.models.experts.grouped import (
        combine_rows,
        grouped_linear,
        permute_rows,
        sort_by_expert,
        spread_rows,
        told_ends,
    )
    from weft.models.experts.moe import Experts, MoE, Router, routers

__getattr__ = loads(
    __name__,
    {
        "Experts": ".moe",
        "Load": ".balance",
        "MoE": ".moe",
        "Router": ".moe",
        "Span": ".balance",
        "attach": ".balance",
        "combine_rows": ".grouped",
        "count_tokens": ".balance",
        "grouped_linear": ".grouped",
        "move_bias": ".balance",
        "permute_rows": ".grouped",
        "routers": ".moe",
        "sequence_loss": ".balance",
        "sort_by_expert": ".grouped",
        "spread_rows": ".grouped",
        "told_ends": ".grouped",
    },
)
