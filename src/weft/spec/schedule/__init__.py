"""Schedules of pipelines as pure values: who does what, in which order."""

from __future__ import annotations

from weft.spec.schedule.action import Action, Pair, Step, parts
from weft.spec.schedule.dependencies import makes, needs
from weft.spec.schedule.schedule import FORMS, Schedule, build_schedule, schedule_of, stage_owner, stages_of

__all__ = [
    "Action",
    "FORMS",
    "Pair",
    "Schedule",
    "Step",
    "build_schedule",
    "makes",
    "needs",
    "parts",
    "schedule_of",
    "stage_owner",
    "stages_of",
]
