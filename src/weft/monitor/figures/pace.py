"""A rank's own work, step by step and without its waits for others, for the first rank to compare."""

from __future__ import annotations

from collections.abc import Mapping

#: Steps of one report: so many are enough to compare, and reports stay small.
_MOST = 8
_MICRO = 1e6


class PaceWriter:
    """Picks some of the steps since the last report: the same ones on every rank, however many each has done.

    They are multiples of a power of two, so that a rank that reports more steps picks a part of what another picks.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Mapping[str, float]] = {}
        self._stride = 1

    def add(self, step: int, own: Mapping[str, float]) -> None:
        """Take a step's own seconds by part."""
        if step % self._stride:
            return
        self._steps[step] = own
        while len(self._steps) > _MOST:
            self._stride *= 2
            self._steps = {one: parts for one, parts in self._steps.items() if one % self._stride == 0}

    def take(self) -> dict[str, object]:
        """Return what a report says of the steps, and begin again; {} where there were none.

        steps: microseconds of each. parts: mean seconds of a step by part.
        """
        steps, self._steps, self._stride = self._steps, {}, 1
        if not steps:
            return {}
        parts = dict.fromkeys(part for own in steps.values() for part in own)
        return {
            "steps": {str(step): round(sum(own.values()) * _MICRO) for step, own in steps.items()},
            "parts": {
                part: float(f"{sum(own.get(part, 0.0) for own in steps.values()) / len(steps):.4g}") for part in parts
            },
        }
