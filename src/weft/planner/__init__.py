"""The planner: which plan trains a model fastest on given machines, why, and why no other. It never imports torch.

Its rooms, each with a door of its own, from the top down: `tell` (what is said of plans) and `scoring` (published runs
against predictions), `search` (from a question to ranked plans), `estimate` (time and memory of many plans at once),
`measured` (machines that were measured), `cost` (formulas for devices), `space` (plans as columns of numbers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "estimate",
]

if TYPE_CHECKING:
    from weft.planner.estimator import estimate

__getattr__ = loads(
    __name__,
    {
        "estimate": ".estimator",
    },
)
