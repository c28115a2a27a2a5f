"""The plan: one frozen value that says how a model is laid over the machines. Its fields describe themselves."""

from __future__ import annotations

from weft.spec.plan.open_plan import MISSING, OpenPlan, Undecided, auto_fields
from weft.spec.plan.plan import (
    AXES,
    PLAN_FIELDS,
    PLANNED_PRECISIONS,
    RECOMPUTES,
    RESHARDS,
    SCHEDULES,
    Plan,
    plan_fields,
)
from weft.spec.plan.plan_field import SearchFacts
from weft.spec.plan.plan_lists import orders
from weft.spec.plan.plan_text import is_auto, split_plan

__all__ = [
    "AXES",
    "MISSING",
    "OpenPlan",
    "PLANNED_PRECISIONS",
    "PLAN_FIELDS",
    "Plan",
    "RECOMPUTES",
    "RESHARDS",
    "SCHEDULES",
    "SearchFacts",
    "Undecided",
    "auto_fields",
    "is_auto",
    "orders",
    "plan_fields",
    "split_plan",
]
