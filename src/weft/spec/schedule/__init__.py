"""Schedules of pipelines as pure values: who does what, in which order."""

from weft.spec.schedule.action import Action, Pair, Step, parts
from weft.spec.schedule.schedule import Schedule, build_schedule, schedule_of, stage_owner, stages_of
from weft.spec.schedule.transfers import Key, Transfer, arrived_by, makes, needs, receiving_early, with_transfers

__all__ = [
    "Action",
    "Key",
    "Pair",
    "Schedule",
    "Step",
    "Transfer",
    "arrived_by",
    "build_schedule",
    "makes",
    "needs",
    "parts",
    "receiving_early",
    "schedule_of",
    "stage_owner",
    "stages_of",
    "with_transfers",
]
