"""The plan: one frozen value that says how a model is laid over the machines. Its fields describe themselves."""

from weft.spec.plan.plan import (
    AXES,
    OFFLOADS,
    PLAN_FIELDS,
    PLANNED_PRECISIONS,
    PRECISIONS,
    RECOMPUTES,
    REDUCES,
    RESHARDS,
    SCHEDULES,
    Plan,
    auto_fields,
    plan_fields,
)
from weft.spec.plan.plan_field import SearchFacts
from weft.spec.plan.plan_lists import orders
from weft.spec.plan.plan_text import is_auto, split_plan

__all__ = [
    "AXES",
    "OFFLOADS",
    "PLANNED_PRECISIONS",
    "PLAN_FIELDS",
    "PRECISIONS",
    "Plan",
    "RECOMPUTES",
    "REDUCES",
    "RESHARDS",
    "SCHEDULES",
    "SearchFacts",
    "auto_fields",
    "is_auto",
    "orders",
    "plan_fields",
    "split_plan",
]
