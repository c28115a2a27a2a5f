"""StepRecord: all that is known of one optimizer step, as the event log, the display and the plot read it."""

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

from weft.errors import DataError, TrainingHalted

#: What an event of a step leaves out.
_NOT_TOLD = frozenset({"unit", "busy_s", "exposed", "data_s", "own", "usual_loss"})
#: What an evaluation found beside the loss: (value, its unit or name).
Metrics = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    step: steps done, this one included (1 is the first). loss: mean over what is counted. count: how many were trained
    in this step, over all ranks; unit: what they are, such as "tokens". seconds: host time by phase, and "total".
    memory_bytes: this rank's peak. busy_s: this rank computed and waited for nobody; exposed: it waited for others, by
    axis; data_s: it waited for data; own: its own work by part; these four stay out of the event, where figures of all
    ranks have their own. usual_loss: where the loss jumps far above it.
    samples_per_s: where they are not what is counted. skipped: why the weights were not changed, or None. mfu: None
    where the device's peak is not known. loss_scale: of fp16, else None. update_ratio: norm of the update over the norm
    of the weights, None in a step that does not measure it.
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
        """Return one line of events.jsonl, of kind "step"; what does not apply to this run is left out.

        Counts are called by their unit: "tokens" and "tokens_per_s".
        """
        names = {"count": self.unit, "count_per_s": f"{self.unit}_per_s"}
        event: dict[str, object] = {"event": "step"}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and name not in _NOT_TOLD:
                event[names.get(name, name)] = value
        event["seconds"] = {phase: round(seconds, 6) for phase, seconds in self.seconds.items()}
        return event


# events.jsonl: one JSON object a line, appended with one write call each, readable while and after the run.

_BLOCK_BYTES = 64 * 1024
#: Bytes of events that wait in memory for room on a full disk; what comes beyond them is lost, and counted.
_MOST_WAITING_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventLog:
    """Appends events to a file that it creates, with its folder, where it is missing.

    A last line that a killed writer left torn is cut off first. One process writes; any number may read. While the disk
    is full, events wait in memory, and each further one tries again. Left as a context, it raises where some still do.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._num_lost = 0
        self._full: OSError | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mode = self.path.parent.stat().st_mode & 0o666  # as private as its folder
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
            _remove_torn_line(self._handle)
        except OSError as error:
            raise self._halted(error) from error

    def write(self, event: Mapping[str, object]) -> None:
        """Append one event; "time" is added where absent.

        The line is with the kernel on return, so that it survives the death of this process, unless the disk is full.

        Raises:
            TrainingHalted: when it cannot be written, and room would not help.
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
        """How many events wait for room on a full disk, or were lost to it."""
        return len(self._waiting) + self._num_lost

    def _wait(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def _push(self) -> None:
        """Write what waits. A line of which only a part went stays first with its rest."""
        while self._waiting:
            line = self._waiting[0]
            done = os.write(self._handle, line)
            self._waiting_bytes -= done
            if done < len(line):  # The disk is nearly full: the next write says so.
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
            f"run.dir={self.path.parent}: events cannot be written to {self.path.name} ({error.strerror})."
            " Make room or choose another run.dir, and run the same command again: it resumes."
        )


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a log, oldest first; empty when there is no file. A torn last line is left out.

    A damaged line in the middle becomes {"event": "damaged", "line": its number}, so that the rest stays readable.

    Raises:
        DataError: where the file cannot be read.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: events cannot be read ({error.strerror}).") from error
    # What follows the last line break is empty, or was torn by a killed writer.
    return [_decode(line, number) for number, line in enumerate(lines[:-1], start=1)]


def tail_events(path: Path, num_bytes: int = 2**20) -> list[dict[str, Any]]:
    """Return the events in the last `num_bytes` of a log, oldest first, without reading a long log whole."""
    try:
        with open(path, "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # The first line is cut where the log is longer, the last is empty or torn.
    return [_decode(line, 0) for line in lines[bool(start) : -1]]


def last_per_step(events: Iterable[Mapping[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """Return the events of one kind, one a step and in the order of steps: the later of two events of a step is kept.

    An event {"event": "resume", "step": n} drops what was logged beyond step n before it: that work was done again.
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
    """Open a regular file, or a link to one, for reading. A FIFO or a device is never opened or waited for.

    Raises:
        OSError: for anything else, and if the file is missing or may not be read.
    """
    # Opening a device may act on it, so that it is looked at before; another file may be there by the time it is open.
    _require_regular(os.stat(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def number(value: object) -> float:
    """A float as `EventLog` wrote it: "nan" and "inf" come back as floats, and anything else that is none as nan."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # a whole number that no float holds
            return math.nan
    return float(value) if value in ("nan", "inf", "-inf") else math.nan


def _encode(event: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except ValueError:
        # Rare: only a line with a float that is not finite pays for the walk.
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
