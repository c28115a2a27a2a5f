"""StepColumns of numbers by step: appended in pieces, cut where steps are done again, thinned out for a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.monitor.events import number

_FIRST = 1024


class StepColumns:
    """Rows in ascending order of steps; a value that a row lacks is nan. Values are kept with 24 bits."""

    def __init__(self) -> None:
        self._count = 0
        self._step = np.empty(_FIRST, np.int64)
        self._time = np.empty(_FIRST, np.float64)
        self._values: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def names(self) -> list[str]:
        """The columns."""
        return list(self._values)

    @property
    def steps(self) -> np.ndarray:
        """All steps."""
        return self._step[: self._count]

    @property
    def times(self) -> np.ndarray:
        """Seconds since 1970."""
        return self._time[: self._count]

    def values(self, name: str) -> np.ndarray:
        """Return one column; all nan where there is none of this name."""
        found = self._values.get(name)
        return np.full(self._count, np.nan, np.float32) if found is None else found[: self._count]

    def last(self, name: str) -> float | None:
        """Return the newest finite value; None where there is none among the last rows."""
        found = self._values.get(name)
        if found is None:
            return None
        tail = found[max(0, self._count - 200) : self._count]
        finite = tail[np.isfinite(tail)]
        return float(finite[-1]) if len(finite) else None

    def append(self, steps: Sequence[int], times: Sequence[float], values: Mapping[str, Sequence[Any]]) -> None:
        """Add rows. Where a step is not beyond the one before it, the rows from that step on are replaced.

        Args:
            steps: of the rows.
            times: seconds since 1970.
            values: columns by name; what is no number becomes nan.
        """
        if not len(steps):
            return
        new = np.asarray(steps, np.int64)
        falls = np.flatnonzero(np.diff(new) <= 0)
        if len(falls):
            at = int(falls[0]) + 1
            self.append(new[:at].tolist(), times[:at], {name: column[:at] for name, column in values.items()})
            self.append(new[at:].tolist(), times[at:], {name: column[at:] for name, column in values.items()})
            return
        self.cut_beyond(int(new[0]) - 1)
        start, end = self._count, self._count + len(new)
        self._reserve(end)
        self._step[start:end], self._time[start:end] = new, _floats(times)
        for name in self._values.keys() - values.keys():
            self._values[name][start:end] = np.nan
        for name, column in values.items():
            if name not in self._values:
                self._values[name] = np.full(len(self._step), np.nan, np.float32)
            with np.errstate(over="ignore"):
                self._values[name][start:end] = _floats(column)
        self._count = end

    def cut_beyond(self, step: int) -> None:
        """Forget rows beyond this step."""
        if self._count and self._step[self._count - 1] > step:
            self._count = int(np.searchsorted(self.steps, step, side="right"))

    def rows(self, first: float, last: float) -> slice:
        """Return the rows with first <= step <= last."""
        begin = int(np.searchsorted(self.steps, first, side="left"))
        return slice(begin, max(begin, int(np.searchsorted(self.steps, last, side="right"))))

    def _reserve(self, count: int) -> None:
        if count <= len(self._step):
            return
        size = max(count, len(self._step) * 2)
        self._step = np.resize(self._step, size)
        self._time = np.resize(self._time, size)
        self._values = {name: np.resize(column, size) for name, column in self._values.items()}


def thinned(values: np.ndarray, points: int) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """Return (mean, least, greatest) of buckets of equal numbers of rows, `points` at most; None where all are nan.

    What is not finite shows in no bucket; the page marks it from the events.
    """
    edges = bucket_edges(len(values), points)
    if len(edges) == len(values):
        one = _listed(np.where(np.isfinite(values), values, np.nan))
        return one, one, one
    finite = np.isfinite(values)
    if finite.all():  # as nearly always, and several times faster
        sizes = np.diff(edges, append=len(values))
        mean = np.add.reduceat(values, edges, dtype=np.float64) / sizes
        return _listed(mean), _listed(np.minimum.reduceat(values, edges)), _listed(np.maximum.reduceat(values, edges))
    # Only what is there is added up: a figure of every tenth step costs a tenth.
    rows = np.flatnonzero(finite)
    begins = np.searchsorted(rows, edges)
    sizes = np.diff(begins, append=len(rows))
    full, kept = sizes > 0, values[rows]
    found = np.full((3, len(edges)), np.nan)
    if full.any():
        first = begins[full]
        found[0, full] = np.add.reduceat(kept, first, dtype=np.float64) / sizes[full]
        found[1, full] = np.minimum.reduceat(kept, first)
        found[2, full] = np.maximum.reduceat(kept, first)
    mean, low, high = map(_listed, found)
    return mean, low, high


def bucket_edges(count: int, points: int) -> np.ndarray:
    """Return the first row of each bucket."""
    number = max(1, min(count, points))
    return (np.arange(number) * count // number).astype(np.int64) if count else np.empty(0, np.int64)


def _listed(values: np.ndarray) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if math.isnan(one) else float(f"{one:.6g}") for one in values.tolist()]


def _floats(column: Iterable[Any]) -> np.ndarray:
    try:
        return np.asarray(column, np.float64)  # None is nan, and so are "nan" and "inf" as the log writes them
    except (ValueError, TypeError, OverflowError):
        return np.asarray([number(one) for one in column], np.float64)
