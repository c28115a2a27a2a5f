"""Histories that never grow beyond a bound: when they are full, neighbours are joined and each place holds twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.monitor.events import number

#: No figure is greater; sums of such stay finite.
_GREATEST = 1e200


class BoundedSeries:
    """A figure over a run: least, mean and greatest of its readings, in `places` places at most.

    Args:
        places: even.
    """

    def __init__(self, places: int = 1024):
        self._places, self._width, self._inside = places, 1, 0
        self._rows: list[list[float]] = []  # step, time, low, sum, high, how many
        self.last: tuple[float, float, float, str, str] | None = None

    def add(self, step: float, time: float, reading: tuple[float, float, float], at: tuple[str, str]) -> None:
        """Add a reading: (least, middle, greatest) and whose the ends are."""
        low, middle, high = reading
        if not all(math.isfinite(one) and abs(one) < _GREATEST for one in reading):
            return
        self.last = (low, middle, high, *at)
        if self._inside % self._width == 0:
            if len(self._rows) == self._places:
                self._rows = [_joined(*self._rows[at : at + 2]) for at in range(0, self._places, 2)]
                self._width *= 2
            self._rows.append([step, time, low, middle, high, 1.0])
            self._inside = 1
            return
        self._rows[-1] = _joined(self._rows[-1], [step, time, low, middle, high, 1.0])
        self._inside += 1

    def picture(self) -> dict[str, list[float]]:
        """Return columns: step, time, low, mean, high."""
        return {
            "step": [row[0] for row in self._rows],
            "time": [round(row[1], 1) for row in self._rows],
            "low": [float(f"{row[2]:.6g}") for row in self._rows],
            "mean": [float(f"{row[3] / row[5]:.6g}") for row in self._rows],
            "high": [float(f"{row[4]:.6g}") for row in self._rows],
        }


def _joined(one: list[float], other: list[float]) -> list[float]:
    return [
        other[0], other[1], min(one[2], other[2]), one[3] + other[3], max(one[4], other[4]), one[5] + other[5],
    ]  # fmt: skip


class RankHeat:
    """Seconds of each rank over a run: one row a rank, `places` columns at most.

    Args:
        places: even.
    """

    def __init__(self, places: int = 480):
        self._places, self._width, self._inside = places, 1, 0
        self._sum = np.zeros((0, places), np.float32)
        self._count = np.zeros((0, places), np.uint32)
        self._steps: list[float] = []

    @property
    def num_ranks(self) -> int:
        """Ranks seen so far."""
        return len(self._sum)

    def add(self, step: float, by_rank: Sequence[Any]) -> None:
        """Add one report; a rank that was silent has None."""
        if not by_rank:
            return
        self._grow(len(by_rank))
        if self._inside % self._width == 0:
            if len(self._steps) == self._places:
                self._halve()
            self._steps.append(step)
            self._inside = 0
        at = len(self._steps) - 1
        self._steps[at] = step
        values = np.asarray([number(value) for value in by_rank], np.float32)
        told = np.isfinite(values) & (values >= 0)
        rows = slice(0, len(values))
        self._sum[rows, at] += np.where(told, values, 0)
        self._count[rows, at] += told
        self._inside += 1

    def picture(self) -> tuple[list[float], np.ndarray]:
        """Return the columns' steps, and each rank's seconds over the median rank's as bytes.

        100 is the median, 200 twice of it, 1 is 0.01 of it and less, 250 is 2.5 times and more; 0 where a rank was
        silent. Shape: (ranks, columns).
        """
        columns = len(self._steps)
        count = self._count[:, :columns]
        mean = np.where(count > 0, self._sum[:, :columns] / np.maximum(count, 1), np.nan)
        if not mean.size:
            return list(self._steps), np.zeros((self.num_ranks, columns), np.uint8)
        silent = np.isnan(mean)
        filled = np.where(silent.all(axis=0), 0.0, mean)  # a column without any report has no median
        middle = np.nanmedian(filled, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(middle > 0, mean / middle, 1.0)
        scaled = np.clip(np.rint(np.nan_to_num(ratio, nan=0.0, posinf=2.5) * 100), 1, 250)
        return list(self._steps), np.where(silent, 0, scaled).astype(np.uint8)

    def slowest(self) -> tuple[int, float] | None:
        """Return the rank with the largest median ratio over the newest columns, and that ratio."""
        _, picture = self.picture()
        if picture.shape[0] < 2 or not picture.shape[1]:
            return None
        recent = picture[:, -8:].astype(np.float64)
        middle = np.median(recent, axis=1)
        rank = int(np.argmax(middle))
        return rank, float(middle[rank]) / 100

    def _grow(self, ranks: int) -> None:
        more = ranks - self.num_ranks
        if more > 0:
            self._sum = np.pad(self._sum, ((0, more), (0, 0)))
            self._count = np.pad(self._count, ((0, more), (0, 0)))

    def _halve(self) -> None:
        half = self._places // 2
        for name in ("_sum", "_count"):
            found: np.ndarray = getattr(self, name)
            joined = np.zeros_like(found)
            joined[:, :half] = found[:, 0::2] + found[:, 1::2]
            setattr(self, name, joined)
        self._steps = self._steps[1::2]
        self._width *= 2
