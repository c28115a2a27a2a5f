"""What a run tells: events for machines, a display for people, a curve at the end, and a stop when it goes wrong.

Importing this costs neither torch nor matplotlib nor rich.
"""

from __future__ import annotations

from weft.monitor.account import Goodput, Price, TimeLedger, best_interval, goodput
from weft.monitor.events import EventLog, last_per_step, read_events, tail_events
from weft.monitor.flops import flops_per_token, mfu
from weft.monitor.garbage import GarbageTurns
from weft.monitor.health import NonFiniteGuard
from weft.monitor.record import StepRecord
from weft.monitor.spikes import SpikeWatch

__all__ = [
    "EventLog",
    "GarbageTurns",
    "Goodput",
    "TimeLedger",
    "NonFiniteGuard",
    "Price",
    "SpikeWatch",
    "StepRecord",
    "best_interval",
    "flops_per_token",
    "goodput",
    "last_per_step",
    "mfu",
    "read_events",
    "tail_events",
]
