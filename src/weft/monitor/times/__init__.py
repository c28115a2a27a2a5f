"""Where the seconds of a step and of a run went, and how much memory there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Meter",
    "StepTimes",
    "TimeBook",
    "busy_seconds",
    "chrome_trace",
    "draw_times",
    "memory_bytes",
    "own_seconds",
    "time_lines",
]

if TYPE_CHECKING:
    from weft.monitor.times.meter import Meter, StepTimes, memory_bytes
    from weft.monitor.times.time_book import TimeBook, busy_seconds, chrome_trace, draw_times, own_seconds, time_lines

__getattr__ = loads(
    __name__,
    {
        "Meter": ".meter",
        "StepTimes": ".meter",
        "TimeBook": ".time_book",
        "busy_seconds": ".time_book",
        "chrome_trace": ".time_book",
        "draw_times": ".time_book",
        "memory_bytes": ".meter",
        "own_seconds": ".time_book",
        "time_lines": ".time_book",
    },
)
