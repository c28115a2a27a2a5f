"""From a batch to the model: how it is cut into microbatches, and how the model is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "LABELS",
    "Costs",
    "Microbatches",
    "StepPlaces",
    "call_model",
    "cost_limits",
    "costs_of",
    "cut_rows",
    "from_loader",
    "microbatch_size",
    "microbatches_of",
    "samples_in",
    "samples_of",
    "stands_in",
    "traced_costs",
    "values_in",
]

if TYPE_CHECKING:
    from weft.train.microbatch.by_cost import Costs, cost_limits, costs_of, traced_costs
    from weft.train.microbatch.forward import LABELS, call_model
    from weft.train.microbatch.microbatches import (
        Microbatches,
        cut_rows,
        from_loader,
        microbatch_size,
        microbatches_of,
        samples_in,
        samples_of,
        stands_in,
        values_in,
    )
    from weft.train.microbatch.step_places import StepPlaces

__getattr__ = loads(
    __name__,
    {
        "Costs": ".by_cost",
        "LABELS": ".forward",
        "Microbatches": ".microbatches",
        "StepPlaces": ".step_places",
        "call_model": ".forward",
        "cost_limits": ".by_cost",
        "costs_of": ".by_cost",
        "cut_rows": ".microbatches",
        "from_loader": ".microbatches",
        "microbatch_size": ".microbatches",
        "microbatches_of": ".microbatches",
        "samples_in": ".microbatches",
        "samples_of": ".microbatches",
        "stands_in": ".microbatches",
        "traced_costs": ".by_cost",
        "values_in": ".microbatches",
    },
)
