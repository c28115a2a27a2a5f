"""Terms of a step's time and memory on devices of their own, each from specs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "CLASSES",
    "TERMS",
    "LayerCosts",
    "Parts",
    "budget_s",
    "cut_loss_bytes",
    "device_parts",
    "is_loss_cut",
    "layer_bytes",
    "layer_costs",
    "model_flops",
    "padded_vocab",
    "rank_bytes",
    "rank_shares",
    "replay_s",
    "stays_loose",
]

if TYPE_CHECKING:
    from weft.planner.cost.layer_cost import LayerCosts, layer_costs, padded_vocab
    from weft.planner.cost.memory import CLASSES, cut_loss_bytes, is_loss_cut, layer_bytes, rank_bytes, stays_loose
    from weft.planner.cost.recompute_cost import budget_s, replay_s
    from weft.planner.cost.shares import rank_shares
    from weft.planner.cost.step import TERMS, Parts, device_parts
    from weft.planner.cost.traced_cost import model_flops

__getattr__ = loads(
    __name__,
    {
        "CLASSES": ".memory",
        "LayerCosts": ".layer_cost",
        "Parts": ".step",
        "TERMS": ".step",
        "budget_s": ".recompute_cost",
        "cut_loss_bytes": ".memory",
        "device_parts": ".step",
        "is_loss_cut": ".memory",
        "layer_bytes": ".memory",
        "layer_costs": ".layer_cost",
        "model_flops": ".traced_cost",
        "padded_vocab": ".layer_cost",
        "rank_bytes": ".memory",
        "rank_shares": ".shares",
        "stays_loose": ".memory",
        "replay_s": ".recompute_cost",
    },
)
