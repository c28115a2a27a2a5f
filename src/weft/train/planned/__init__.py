"""The planner at both ends of a run: the plan that it chooses before, and what it expected beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "PlanWatch",
    "choose_plan",
    "chosen_line",
    "record_choice",
    "report_times",
    "settle_plan",
    "this_cluster",
]

if TYPE_CHECKING:
    from weft.train.planned.auto_plan import choose_plan, chosen_line, record_choice, settle_plan, this_cluster
    from weft.train.planned.plan_watch import PlanWatch
    from weft.train.planned.time_report import report_times

__getattr__ = loads(
    __name__,
    {
        "PlanWatch": ".plan_watch",
        "choose_plan": ".auto_plan",
        "chosen_line": ".auto_plan",
        "record_choice": ".auto_plan",
        "report_times": ".time_report",
        "settle_plan": ".auto_plan",
        "this_cluster": ".auto_plan",
    },
)
