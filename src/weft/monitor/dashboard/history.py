"""Bounded histories of a run for the dashboard, and the reader of its growing log."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.monitor.events import number, open_regular
from weft.units import format_seconds

#: Larger values are dropped, so that sums stay finite.
_GREATEST = 1e200


class BoundedSeries:
    """A metric over a run: minimum, mean and maximum of its readings, in at most `places` buckets.

    When all buckets are full, neighbors are merged and each bucket covers twice as many readings.
    """

    def __init__(self, places: int = 1024):
        self._places, self._width, self._inside = places, 1, 0
        self._rows: list[list[float]] = []  # step, time, minimum, sum, maximum, count
        self.last: tuple[float, float, float, str, str] | None = None

    def add(self, step: float, time: float, reading: tuple[float, float, float], at: tuple[str, str]) -> None:
        """Add a reading (minimum, median, maximum), and the names of the ranks with the minimum and the maximum.

        Readings with a value that is not finite, or has a magnitude of 1e200 or more, are ignored.
        """
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
        """Return the columns step, time, low, mean and high. Step and time are of the last reading in a bucket."""
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
    """Busy seconds of each rank over a run: one row per rank, at most `places` columns of steps."""

    def __init__(self, places: int = 480):
        self._places, self._width, self._inside = places, 1, 0
        self._sum = np.zeros((0, places), np.float32)
        self._count = np.zeros((0, places), np.uint32)
        self._steps: list[float] = []

    @property
    def num_ranks(self) -> int:
        """Largest number of ranks in the reports so far."""
        return len(self._sum)

    def add(self, step: float, by_rank: Sequence[Any]) -> None:
        """Add the values of all ranks at a step. A silent rank has None."""
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
        usable = np.isfinite(values) & (values >= 0)
        rows = slice(0, len(values))
        self._sum[rows, at] += np.where(usable, values, 0)
        self._count[rows, at] += usable
        self._inside += 1

    def picture(self) -> tuple[list[float], np.ndarray]:
        """Return the columns' steps, and each rank's seconds relative to the median rank as bytes (ranks, columns).

        100 is the median, 200 twice the median. 1 is 0.01 or less, 250 is 2.5 or more. 0 means that a rank was silent.
        """
        columns = len(self._steps)
        count = self._count[:, :columns]
        mean = np.where(count > 0, self._sum[:, :columns] / np.maximum(count, 1), np.nan)
        if not mean.size:
            return list(self._steps), np.zeros((self.num_ranks, columns), np.uint8)
        silent = np.isnan(mean)
        filled = np.where(silent.all(axis=0), 0.0, mean)  # nanmedian of a column without any report would warn
        middle = np.nanmedian(filled, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(middle > 0, mean / middle, 1.0)
        scaled = np.clip(np.rint(np.nan_to_num(ratio, nan=0.0, posinf=2.5) * 100), 1, 250)
        return list(self._steps), np.where(silent, 0, scaled).astype(np.uint8)

    def slowest(self) -> tuple[int, float] | None:
        """Return the rank with the largest median ratio over the newest eight columns, and that ratio.

        Return None for less than two ranks, or if there are no columns.
        """
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


# Reading a growing file of JSON lines in chunks.

#: Bytes per chunk. A reader checks the clock between two chunks.
PIECE = 2 * 2**20
#: Longer lines are dropped. Weft writes none.
_LONGEST = 64 * 2**20


class LogTail:
    """Reads a log in chunks, and returns the complete lines that were appended since the last call.

    Attributes:
        offset, size: position up to which the file was read, and its size, in bytes.
        trouble: reason why the file cannot be read, or "".
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.size = 0
        self.trouble = ""
        self._file = 0
        self._rest = b""

    def changed(self) -> bool:
        """Return True if there is new data to read, or if a file that was read has been replaced or is unreadable."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            self.size, self.trouble = 0, error.strerror or str(error)
            return self.offset > 0
        self.size = found.st_size
        return found.st_size != self.offset or found.st_ino != self._file

    def read(self, limit: int = PIECE) -> tuple[list[bytes], bool]:
        """Return the lines of the next chunk, and True if the lines returned earlier are no longer valid.

        This is so if the file was replaced, became shorter, or cannot be read. Lines above 64 MiB are dropped.
        """
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                void = self.offset > 0 and (found.st_size < self.offset or found.st_ino != self._file)
                if void:
                    self.offset, self._rest = 0, b""
                self._file, self.size = found.st_ino, found.st_size
                file.seek(self.offset)
                text = file.read(limit)
        except OSError as error:
            void = self.offset > 0
            self.offset, self._rest, self.trouble = 0, b"", error.strerror or str(error)
            return [], void
        self.trouble = ""
        self.offset += len(text)
        complete, cut, rest = (self._rest + text).rpartition(b"\n")
        self._rest = rest if len(rest) <= _LONGEST else b""
        return (complete.split(b"\n") if cut else []), void

    def skip_to_last(self, num_bytes: int) -> None:
        """Move to the first complete line of the last `num_bytes`."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                start = max(0, found.st_size - num_bytes)
                file.seek(start)
                cut = file.read(PIECE).find(b"\n") + 1
        except OSError:
            return
        self.offset, self._file, self.size, self._rest = start + cut, found.st_ino, found.st_size, b""


def decode(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the events of the lines. Lines that are not JSON objects are dropped."""
    if not lines:
        return []
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # one call for all is faster
    except (ValueError, RecursionError):
        found = [_one(line) for line in lines]
    return [event for event in found if isinstance(event, dict)]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# Columns of numbers by step: appended in chunks, truncated where steps are repeated, downsampled for a plot.

_FIRST = 1024


class StepColumns:
    """Rows in ascending order of steps, with float32 values. Missing values are nan."""

    def __init__(self) -> None:
        self._count = 0
        self._step = np.empty(_FIRST, np.int64)
        self._time = np.empty(_FIRST, np.float64)
        self._values: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self._values)

    @property
    def steps(self) -> np.ndarray:
        """Step of each row."""
        return self._step[: self._count]

    @property
    def times(self) -> np.ndarray:
        """Time of each row, in seconds since 1970."""
        return self._time[: self._count]

    def values(self, name: str) -> np.ndarray:
        """Return one column, all nan if it does not exist."""
        found = self._values.get(name)
        return np.full(self._count, np.nan, np.float32) if found is None else found[: self._count]

    def last(self, name: str) -> float | None:
        """Return the newest finite value in the last 200 rows, or None."""
        found = self._values.get(name)
        if found is None:
            return None
        tail = found[max(0, self._count - 200) : self._count]
        finite = tail[np.isfinite(tail)]
        return float(finite[-1]) if len(finite) else None

    def append(self, steps: Sequence[int], times: Sequence[float], values: Mapping[str, Sequence[Any]]) -> None:
        """Append rows. If a step is not larger than the previous one, the rows from that step on are replaced.

        Args:
            steps: step of each row.
            times: seconds since 1970.
            values: columns by name. Values that are not numbers become nan.
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
        self.truncate_after(int(new[0]) - 1)
        start, end = self._count, self._count + len(new)
        if end > len(self._step):
            size = max(end, len(self._step) * 2)
            self._step, self._time = np.resize(self._step, size), np.resize(self._time, size)
            self._values = {name: np.resize(column, size) for name, column in self._values.items()}
        self._step[start:end], self._time[start:end] = new, _floats(times)
        for name in self._values.keys() - values.keys():
            self._values[name][start:end] = np.nan
        for name, column in values.items():
            if name not in self._values:
                self._values[name] = np.full(len(self._step), np.nan, np.float32)
            with np.errstate(over="ignore"):
                self._values[name][start:end] = _floats(column)
        self._count = end

    def truncate_after(self, step: int) -> None:
        """Drop the rows after this step."""
        if self._count and self._step[self._count - 1] > step:
            self._count = int(np.searchsorted(self.steps, step, side="right"))

    def rows(self, first: float, last: float) -> slice:
        """Return the rows with first <= step <= last."""
        begin = int(np.searchsorted(self.steps, first, side="left"))
        return slice(begin, max(begin, int(np.searchsorted(self.steps, last, side="right"))))


def thinned(values: np.ndarray, points: int) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """Return (mean, minimum, maximum) of at most `points` buckets of equal numbers of rows.

    Non-finite values are skipped. A bucket without finite values is None. If there are at most `points` rows, all three
    are the same list.
    """
    edges = bucket_edges(len(values), points)
    if len(edges) == len(values):
        one = _listed(np.where(np.isfinite(values), values, np.nan))
        return one, one, one
    finite = np.isfinite(values)
    if finite.all():  # the usual case, and several times faster
        sizes = np.diff(edges, append=len(values))
        mean = np.add.reduceat(values, edges, dtype=np.float64) / sizes
        return _listed(mean), _listed(np.minimum.reduceat(values, edges)), _listed(np.maximum.reduceat(values, edges))
    # Sum only existing values, so that a metric of every tenth step costs a tenth of the time.
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
    """Return the index of the first row of each bucket: `count` rows in at most `points` buckets."""
    number = max(1, min(count, points))
    return (np.arange(number) * count // number).astype(np.int64) if count else np.empty(0, np.int64)


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(one) else float(f"{one:.6g}") for one in values.tolist()]


def _floats(column: Iterable[Any]) -> np.ndarray:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        found = np.asarray(column, np.float64)  # None becomes nan
        if found.ndim == 1:  # not a column of lists
            return found
    return np.asarray([number(one) for one in column], np.float64)


# Marks: events that users read, with text and severity.

#: Maximum number of marks that are kept for the page. Older ones are only in the run's log.
_MOST = 2000
#: In order of severity.
LEVELS = ("quiet", "good", "warning", "critical")
_OF_KIND = {
    "start": "good", "end": "good", "checkpoint": "quiet", "copy": "quiet", "warning": "warning", "drift": "warning",
    "alert": "warning", "failure": "critical", "action": "warning", "held": "warning", "go_on": "good",
    "hang": "critical", "slow_rank": "warning", "shares": "warning", "trace": "critical",
}  # fmt: skip
_OF_SEVERITY = {"info": "quiet", "warning": "warning", "error": "critical", "critical": "critical"}
#: Events that are not marks: their numbers are shown as curves, or they repeat another event.
_NO_MARKS = frozenset({"step", "eval", "figures", "plan", "actual", "resume", "energy"})


class Marks:
    """The newest events for users, each as {"id", "kind", "time", "step", "level", "text"}.

    `counts` has the number of all of them, by kind.
    """

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._next = 0
        self.counts: dict[str, int] = {}

    def __iter__(self):
        return iter(self._kept)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event, unless its kind is not listed for users."""
        kind = str(event.get("event", "")) or "note"
        if kind in _NO_MARKS:
            return
        self.counts[kind] = self.counts.get(kind, 0) + 1
        step = event.get("step", event.get("at_step"))
        level = _OF_SEVERITY.get(str(event.get("severity", "")), _OF_KIND.get(kind, "quiet"))
        if kind == "end" and event.get("reason") != "finished":
            level = "warning"
        if kind in ("hang", "slow_rank") and event.get("state") == "ended":
            level = "good"
        self._kept.append(
            {
                "id": self._next,
                "kind": kind,
                "time": number(event.get("time")) if event.get("time") is not None else 0.0,
                "step": step if type(step) is int and abs(step) < 2**62 else None,
                "level": level,
                "text": _words(kind, event)[:2000],
            }
        )
        self._next += 1


def _words(kind: str, event: Mapping[str, Any]) -> str:
    if kind == "start":
        ranks = event.get("world_size", 1)
        return (
            f"starts at step {event.get('step', 0)} on {ranks} rank{'' if ranks == 1 else 's'}: {event.get('plan', '')}"
        )
    if kind == "end":
        return f"ends: {event.get('reason', '')}"
    if kind in ("checkpoint", "copy"):
        stall, durable = number(event.get("stall_s")), number(event.get("durable_s"))
        what = str(event.get("path") or "copy in memory")
        if not (math.isfinite(stall) and math.isfinite(durable)):
            return what
        return f"{what}: training waited {format_seconds(stall)}, safe after {format_seconds(durable)}"
    if kind == "action":
        why = f": {event['why']}" if event.get("why") else ""
        return f"{event.get('action', '')}, requested by {event.get('by', 'a person')}{why}"
    said = event.get("text") or event.get("message") or event.get("reason") or event.get("why") or ""
    name = event.get("name") or event.get("alert") or event.get("cause") or ""
    state = event.get("state") or ""
    return " ".join(str(word) for word in (name, f"({state})" if state else "", said) if word) or kind
