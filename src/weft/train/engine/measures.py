"""What an engine lets the thread of figures read, and where that thread reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.monitor.figures import OwnBoard, ReportBoard


def _nothing() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one rank that its engine alone knows.

    board: where the ranks leave their reports. traffic: bytes that this rank sent since it started, by series; read by
    another thread than training's. memory: bytes of its device by series, asked once, between two steps. gpu: the
    UUID of its GPU, None on other devices.
    """

    board: ReportBoard = field(default_factory=OwnBoard)
    traffic: Callable[[], Mapping[str, float]] = _nothing
    memory: Callable[[], Mapping[str, float]] = _nothing
    gpu: str | None = None
