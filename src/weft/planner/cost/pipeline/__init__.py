"""Pipelines: in closed form for many plans at once, and a schedule carried out on a clock."""

from __future__ import annotations

from weft.planner.cost.pipeline.makespan import makespan_s
from weft.planner.cost.pipeline.pipeline_cost import (
    OF_FLIGHT,
    Stages,
    balanced_layers,
    bubble_s,
    chunks_per_rank,
    even_layers,
    fullest_moment,
    hidden_sends,
    in_flight,
    sends,
    split_layers,
)
from weft.planner.cost.pipeline.pipeline_sim import Durations, Timeline, simulate

__all__ = [
    "Durations",
    "OF_FLIGHT",
    "Stages",
    "Timeline",
    "balanced_layers",
    "bubble_s",
    "chunks_per_rank",
    "even_layers",
    "fullest_moment",
    "hidden_sends",
    "in_flight",
    "makespan_s",
    "sends",
    "simulate",
    "split_layers",
]
