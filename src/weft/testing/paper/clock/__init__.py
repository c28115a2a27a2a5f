"""Simulated time: a clock of one rank, and the clocks of several ranks that wait for each other."""

from __future__ import annotations

from weft.testing.paper.clock.notes import Moment, Notes
from weft.testing.paper.clock.roofline import (
    COLLECTIVE_LAUNCH_S,
    FLOPS,
    GRAPH_LAUNCH_S,
    LINK_BYTES_PER_S,
    RooflineClock,
    collective_s,
    kernel_s,
)
from weft.testing.paper.clock.together import Timed, timed_together

__all__ = [
    "COLLECTIVE_LAUNCH_S",
    "FLOPS",
    "GRAPH_LAUNCH_S",
    "LINK_BYTES_PER_S",
    "Moment",
    "Notes",
    "RooflineClock",
    "Timed",
    "collective_s",
    "kernel_s",
    "timed_together",
]
