"""The plans that may be tried, as columns of numbers, and what they train."""

from __future__ import annotations

from weft.planner.space import plan_space, wire_columns
from weft.planner.space.adapter_size import AdapterSize
from weft.planner.space.columns import CP_MODES, PRECISIONS, Columns, Job
from weft.planner.space.enumerate import PlanGrid, Refused, Tally, enumerate_space
from weft.planner.space.frozen_work import FrozenWork
from weft.planner.space.plan_space import Space
from weft.planner.space.shape import Shape
from weft.planner.space.stack import Stack
from weft.planner.space.traced_shape import TracedShape

__all__ = [
    "AdapterSize",
    "CP_MODES",
    "Columns",
    "FrozenWork",
    "Job",
    "PRECISIONS",
    "PlanGrid",
    "Refused",
    "Shape",
    "Space",
    "Stack",
    "Tally",
    "TracedShape",
    "enumerate_space",
    "plan_space",
    "wire_columns",
]
