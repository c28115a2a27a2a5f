"""A run's figures: read on each rank by a thread, folded over the ranks, and taken out of events again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Collector",
    "Fold",
    "GpuSource",
    "HostSource",
    "OwnBoard",
    "FigureReading",
    "ReportBoard",
    "StepFigures",
    "fold",
    "host_name",
    "readings",
]

if TYPE_CHECKING:
    from weft.monitor.figures.collector import Collector, OwnBoard, ReportBoard, StepFigures
    from weft.monitor.figures.folded import Fold, fold
    from weft.monitor.figures.gpu_source import GpuSource
    from weft.monitor.figures.host_source import HostSource, host_name
    from weft.monitor.figures.of_events import FigureReading, readings

__getattr__ = loads(
    __name__,
    {
        "Collector": ".collector",
        "Fold": ".folded",
        "GpuSource": ".gpu_source",
        "HostSource": ".host_source",
        "OwnBoard": ".collector",
        "FigureReading": ".of_events",
        "ReportBoard": ".collector",
        "StepFigures": ".collector",
        "fold": ".folded",
        "host_name": ".host_source",
        "readings": ".of_events",
    },
)
