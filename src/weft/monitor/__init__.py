"""What a run tells: events for machines, a display for people, a curve at the end, and a stop when it goes wrong.

Importing this costs neither torch nor matplotlib nor rich.
"""

from weft.monitor.display import Display, make_display
from weft.monitor.events import EventLog, last_per_step, read_events, tail_events
from weft.monitor.flops import flops_per_token, mfu
from weft.monitor.health import NonFiniteGuard
from weft.monitor.meter import Meter, StepTimes, memory_bytes
from weft.monitor.plot import plot_loss
from weft.monitor.record import StepRecord
from weft.monitor.terminal import busy, tell

__all__ = [
    "Display",
    "EventLog",
    "Meter",
    "NonFiniteGuard",
    "StepRecord",
    "StepTimes",
    "busy",
    "flops_per_token",
    "last_per_step",
    "make_display",
    "memory_bytes",
    "mfu",
    "plot_loss",
    "read_events",
    "tail_events",
    "tell",
]
