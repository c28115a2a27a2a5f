"""What a sink is: takes batches of a run's events and sends them somewhere, or raises; its pump does the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.monitor.figures import FigureReading, readings
from weft.spec.config import SinkSection

_UNFIT = re.compile(r"[^A-Za-z0-9_./ -]")


class SinkTrouble(Exception):
    """Something could not be sent now. The text is fit for logs: it holds no secret."""


@dataclass
class SinkJob:
    """What a sink is made for.

    settings: its table in the config. folder: of the run. run: name of the run. config: of the run, as JSON values.
    kept: what the sink wants to find again at the next start, such as the id of its run; saved after each batch.
    """

    settings: SinkSection
    folder: Path
    run: str
    config: Mapping[str, Any]
    kept: dict[str, Any] = field(default_factory=dict)


class FigureSink:
    """Base of all sinks. One thread calls it. is_current: it shows what is now, and need not hear of the past."""

    is_current = False

    def __init__(self, job: SinkJob):
        self.job = job

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send events, the oldest first; where this raises, the same come again later.

        Raises:
            SinkTrouble: where they could not be sent.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""


def flat(reading: FigureReading) -> Iterator[tuple[str, float]]:
    """Yield names as trackers write them with their values: "phase_s/forward/median" of ranks, "loss" of the run."""
    name = _UNFIT.sub("_", f"{reading.name}/{reading.label}" if reading.label else reading.name)
    if reading.at_low or reading.at_high:
        yield from ((f"{name}/{end}", value) for end, value in
                    (("min", reading.low), ("median", reading.value), ("max", reading.high)))  # fmt: skip
    else:
        yield name, reading.value


def flat_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return an event's figures by the names of `flat`."""
    return {name: value for reading in readings(event) for name, value in flat(reading)}


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config's values by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
