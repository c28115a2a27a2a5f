"""StepRecord and events.jsonl: the record of an optimizer step, and the log that displays and plots read."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from weft import files
from weft.errors import DataError, TrainingHalted

#: Fields of a StepRecord that step events omit.
_NOT_TOLD = frozenset({"unit", "busy_s", "exposed", "data_s", "own", "usual_loss"})
#: Metrics of an evaluation in addition to the loss: (value, its unit or name).
Metrics = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one optimizer step.

    The fields `busy_s`, `exposed`, `data_s` and `own` (in seconds) are not in the event, because reports of all ranks
    cover them.

    Attributes:
        step: number of steps done, including this one (from 1).
        loss: mean over the items that count in the loss.
        count, unit: number of these items in this step over all ranks, and their name, such as "tokens".
        seconds: host time by phase, and "total".
        memory_bytes: this rank's peak.
        mfu: None if the device's peak is unknown.
        loss_scale: set for fp16 only.
        update_ratio: norm of the update over the norm of the weights, or None in steps in which it is not measured.
        skipped: the reason why the weights were not changed, or None.
        samples_per_s: set if the items are not samples.
        busy_s: time of computing without waiting.
        exposed: time of waiting for other ranks, by axis.
        data_s: time of waiting for data.
        own: time of the rank's own work, by part.
        usual_loss: median of recent losses, set if the loss jumps far above it.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    count: int
    count_per_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    mfu: float | None = None
    loss_scale: float | None = None
    update_ratio: float | None = None
    skipped: str | None = None
    unit: str = "tokens"
    samples_per_s: float | None = None
    busy_s: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    data_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)
    usual_loss: float | None = None

    def to_event(self) -> dict[str, object]:
        """Return the step event for events.jsonl, without fields that do not apply to this run.

        Counts are named by their unit: "tokens" and "tokens_per_s".
        """
        names = {"count": self.unit, "count_per_s": f"{self.unit}_per_s"}
        event: dict[str, object] = {"event": "step"}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and name not in _NOT_TOLD:
                event[names.get(name, name)] = value
        event["seconds"] = {phase: round(seconds, 6) for phase, seconds in self.seconds.items()}
        return event


# events.jsonl: one JSON object per line, each appended with one write call, readable during and after the run.

_BLOCK_BYTES = 64 * 1024
#: Maximum bytes of events that wait in memory while the disk is full. Further events are lost, and counted.
_MOST_WAITING_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventLog:
    """Appends events to a file. Creates the file and its folder if missing.

    An incomplete last line of a killed writer is removed first. One process writes; any number may read. While the disk
    is full, up to 1 MiB of events wait in memory, and each further write retries. Further events are lost and counted.

    Raises:
        TrainingHalted: if the file cannot be opened, or at the end of the `with` block if events still wait.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._num_lost = 0
        self._full: OSError | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mode = self.path.parent.stat().st_mode & 0o666  # the permissions of its folder
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
            _remove_torn_line(self._handle)
        except OSError as error:
            raise self._halted(error) from error

    def write(self, event: Mapping[str, object]) -> None:
        """Append one event. "time" is added if absent.

        Unless the disk is full, the line is written (not synced) before this returns, so it survives a crash of this
        process.

        Raises:
            TrainingHalted: if it cannot be written for a reason other than a full disk.
        """
        line = _encode({"time": round(time.time(), 3), **event})
        with self._lock:
            is_kept = False
            try:
                self._push()
                self._wait(line)
                is_kept = True
                self._push()
                self._full = None
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._halted(error) from error
                self._full = error
                if is_kept:
                    return
                if self._num_lost or self._waiting_bytes + len(line) > _MOST_WAITING_BYTES:
                    self._num_lost += 1
                else:
                    self._wait(line)

    @property
    def num_waiting(self) -> int:
        """Number of events that wait for disk space, or were lost for lack of it."""
        return len(self._waiting) + self._num_lost

    def _wait(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def _push(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            done = os.write(self._handle, line)
            self._waiting_bytes -= done
            if done < len(line):  # The disk is nearly full. The next write raises the error.
                self._waiting[0] = line[done:]
                continue
            self._waiting.popleft()
            if self._num_lost and not self._waiting:
                text = f"{self._num_lost} events were lost while the disk was full"
                self._num_lost = 0
                self._wait(_encode({"time": round(time.time(), 3), "event": "warning", "text": text}))

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None and self._full is not None:
            raise self._halted(self._full) from self._full

    def _halted(self, error: OSError) -> TrainingHalted:
        return TrainingHalted(
            f"run.dir={self.path.parent}: events cannot be written to {self.path.name} ({error.strerror}). Free "
            "space or choose another run.dir, and run the same command again: it resumes."
        )


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a log, oldest first, or [] if there is no file. An incomplete last line is ignored.

    A damaged line in the middle becomes {"event": "damaged", "line": its number}, so that the rest stays readable.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: events cannot be read ({error.strerror}).") from error
    # The part after the last line break is empty, or incomplete because the writer was killed.
    return [_decode(line, number) for number, line in enumerate(lines[:-1], start=1)]


def tail_events(path: Path, num_bytes: int = 2**20) -> list[dict[str, Any]]:
    """Return the events in the last `num_bytes` of a log, oldest first, without reading all of a long log.

    Return [] if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # The first line is incomplete if the log is longer; the last is empty or incomplete.
    return [_decode(line, 0) for line in lines[bool(start) : -1]]


def last_per_step(events: Iterable[Mapping[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """Return the events of one kind in the order of steps. Of several events of a step, the last one is kept.

    An event {"event": "resume", "step": n} drops earlier events beyond step n, because those steps were repeated.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for event in events:
        step = event.get("step")
        if type(step) is not int:
            continue
        if event.get("event") == "resume":
            by_step = {known: kept for known, kept in by_step.items() if known <= step}
        elif event.get("event") == kind:
            by_step[step] = dict(event)
    return [by_step[step] for step in sorted(by_step)]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Other files (FIFOs, devices) are not opened.

    Raises:
        OSError: if it is not a regular file, is missing, or may not be read.
    """
    # Opening a device may have side effects, so the type is checked before opening, too.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(files.open_regular(path), "rb")


def number(value: object) -> float:
    """Return a value of an event as a float, or nan if it is not a number.

    `EventLog` writes non-finite floats as "nan", "inf" and "-inf".
    """
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer that is too large for a float
            return math.nan
    return float(value) if value in ("nan", "inf", "-inf") else math.nan


def step_of(event: Mapping[str, Any]) -> int | None:
    """Return the step of an event, or None if it is missing or no integer from 0 to 2**62 - 1."""
    step = event.get("step")
    return step if type(step) is int and 0 <= step < 2**62 else None


def _encode(event: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except ValueError:
        # Rare: only lines with a non-finite float need the recursive conversion.
        return json.dumps(_finite(event), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _decode(line: bytes, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    return event if isinstance(event, dict) else {"event": "damaged", "line": number}


def _remove_torn_line(handle: int) -> None:
    end = os.fstat(handle).st_size
    keep = end
    while keep > 0:
        start = max(0, keep - _BLOCK_BYTES)
        block = os.pread(handle, keep - start, start)
        found = block.rfind(b"\n")
        if found >= 0:
            keep = start + found + 1
            break
        keep = start
    if keep < end:
        os.ftruncate(handle, keep)
