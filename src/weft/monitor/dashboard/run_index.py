"""State of a run for the dashboard, read from its log, and the catalog of the runs of a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft.monitor.accounting import TimeLedger
from weft.monitor.dashboard.history import BoundedSeries, LogTail, Marks, RankHeat, StepColumns, decode
from weft.monitor.dashboard.timed_calls import Late, TimedCalls
from weft.monitor.events import number, open_regular, step_of
from weft.monitor.metrics import readings

#: Columns of a step in addition to its phases. The throughput is named "rate" for any unit.
_OF_STEP = ("loss", "lr", "grad_norm", "update_ratio", "samples_per_s", "mfu", "memory_bytes", "loss_scale")
_PHASE = "phase "
#: Maximum number of series of one run. Further ones are ignored.
_MOST_SERIES = 400
_MOST_PHASES = 16
#: A run is silent after this many seconds and this many step times without an event.
_SILENT_S, _SILENT_STEPS = 90.0, 10.0
#: Minimum size of a long log, and the bytes of its beginning and of its end that are read before the rest.
_LONG_LOG, _BEGIN_BYTES, _NEWEST_BYTES = 8 * 2**20, 256 * 1024, 1024 * 1024
_LONGEST_MEASURED = 2**20


class RunState:
    """State of one run for the page, computed from its events in order."""

    def __init__(self) -> None:
        self.steps, self.evals = StepColumns(), StepColumns()
        self.metrics: dict[str, BoundedSeries] = {}
        self.heat = RankHeat()
        self.marks = Marks()
        self.ledger = TimeLedger()
        self.start: dict[str, Any] = {}
        self.planned: dict[str, Any] = {}
        self.actual: dict[str, Any] = {}
        self.rate_unit = "tokens"
        self.num_events = 0
        self.last_time = math.nan
        self._state, self._reason = "starting", ""
        self.bad_steps: set[int] = set()

    @property
    def step(self) -> int:
        """Number of steps done."""
        if len(self.steps):
            return int(self.steps.steps[-1])
        begun = self.start.get("step")
        return begun if type(begun) is int else 0

    @property
    def num_steps(self) -> int | None:
        """Planned number of steps, or None."""
        config = self.start.get("config")
        found = config.get("train") if isinstance(config, dict) else None
        wanted = found.get("steps") if isinstance(found, dict) else None
        return wanted if type(wanted) is int and 0 < wanted < 2**62 else None

    @property
    def phases(self) -> list[str]:
        """Names of the phases of a step that rank 0 measures."""
        return [name.removeprefix(_PHASE) for name in self.steps.names if name.startswith(_PHASE)]

    def phase(self, name: str) -> np.ndarray:
        """Return the seconds of one phase, by row."""
        return self.steps.values(_PHASE + name)

    def step_s(self) -> float | None:
        """Return the median time (s) of the last 200 steps, or None if no time is recorded."""
        total = self.phase("total")[-200:]
        finite = total[np.isfinite(total)]
        return float(np.median(finite)) if len(finite) else None

    def state(self, now: float | None = None) -> tuple[str, str]:
        """Return (state, reason): running, starting, silent, held, failed, stopped or finished; "" without a reason.

        A run is silent if its last event is older than 90 s and than ten steps. now: current time (s since 1970).
        """
        if self._state in ("running", "starting"):
            quiet = (time.time() if now is None else now) - self.last_time
            if quiet > max(_SILENT_S, _SILENT_STEPS * (self.step_s() or 0.0)):
                return "silent", ""
        return self._state, self._reason

    def feed(self, events: Sequence[dict[str, Any]], *, with_ledger: bool = True) -> None:
        """Add events, in order. with_ledger: whether `ledger` gets them too."""
        if with_ledger:
            self.ledger.feed_all(events)
        batch: list[dict[str, Any]] = []
        for event in events:
            if event.get("event") == "step" and step_of(event) is not None:
                batch.append(event)
                continue
            if batch:
                self._add_steps(batch)
                batch = []
            self._add(event)
        if batch:
            self._add_steps(batch)
        self.num_events += len(events)

    def _add_steps(self, batch: list[dict[str, Any]]) -> None:
        speed = next((key for key in batch[-1] if key.endswith("_per_s") and key != "samples_per_s"), "tokens_per_s")
        self.rate_unit = speed.removesuffix("_per_s")
        parts = [found if isinstance(found := event.get("seconds"), dict) else {} for event in batch]
        columns: dict[str, list[Any]] = {"rate": [event.get(speed) for event in batch]}
        for name in _OF_STEP:
            column = [event.get(name) for event in batch]
            if name in self.steps.names or any(value is not None for value in column):
                columns[name] = column
        known = dict.fromkeys(self.phases)
        for part in (parts[0], parts[-1]):
            known.update(dict.fromkeys(part))
        for name in list(known)[:_MOST_PHASES]:
            columns[_PHASE + str(name)] = [part.get(name) for part in parts]
        steps = [event["step"] for event in batch]
        times: list[Any] = [event.get("time") for event in batch]
        self.steps.append(steps, times, columns)
        for event in batch:
            if isinstance(event.get("loss"), str) and len(self.bad_steps) < 1000:
                self.bad_steps.add(event["step"])
        self._state = "running" if self._state != "held" else self._state
        self._record_time(times[-1])

    def _add(self, event: dict[str, Any]) -> None:
        kind, step = event.get("event"), step_of(event)
        self._record_time(event.get("time"))
        self.marks.add(event)
        if kind in ("start", "resume"):
            self.steps.truncate_after(step or 0)
            self.evals.truncate_after(step or 0)
            self.bad_steps = {one for one in self.bad_steps if one <= (step or 0)}
        if kind == "start":
            self.start = {**event, "step": step or 0}
            self._state, self._reason = "starting", ""
            self.planned, self.actual = {}, {}
        elif kind == "eval" and step is not None:
            found = {key: value for key, value in event.items() if key not in ("event", "time", "step")}
            self.evals.append(
                [step], [number(event.get("time"))], {key: [one] for key, one in list(found.items())[:40]}
            )
        elif kind in ("figures", "energy"):
            self._add_metrics(event)
        elif kind == "plan":
            self.planned = event
        elif kind == "actual":
            self.actual = event
        elif (kind == "action" and event.get("action") == "hold") or kind == "held":
            self._state, self._reason = "held", str(event.get("why", ""))
        elif kind == "go_on":
            self._state, self._reason = "starting", ""
        elif kind == "failure":
            self._state, self._reason = "failed", str(event.get("text", event.get("cause", "")))
        elif kind == "end" and self._state != "held":
            reason = str(event.get("reason", ""))
            self._state, self._reason = ("finished", "") if reason == "finished" else ("stopped", reason)

    def _add_metrics(self, event: Mapping[str, Any]) -> None:
        for one in readings(event):
            name = one.series
            if name not in self.metrics:
                if len(self.metrics) >= _MOST_SERIES:
                    continue
                self.metrics[name] = BoundedSeries()
            at_step = self.step if one.step is None or abs(one.step) >= 2**62 else one.step
            when = one.time if math.isfinite(one.time) else 0.0
            self.metrics[name].add(at_step, when, (one.low, one.value, one.high), (one.at_low, one.at_high))
        by_rank = event.get("by_rank")
        busy = by_rank.get("busy_s") if isinstance(by_rank, Mapping) else None
        if isinstance(busy, list) and len(busy) <= 100_000:
            step = step_of(event)
            self.heat.add(self.step if step is None else step, busy)

    def _record_time(self, when: object) -> None:
        found = number(when)
        if math.isfinite(found):
            self.last_time = found if math.isnan(self.last_time) else max(self.last_time, found)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Lines read by `RunIndex.fetch`. `old`: lines of a long log, read from its beginning in the background.

    `void`, `old_void`: True if the lines read before are no longer valid, because the log was replaced.
    """

    lines: list[bytes]
    void: bool = False
    old: list[bytes] = field(default_factory=list)
    old_void: bool = False
    measured: dict[str, Any] | None = None


class RunIndex(RunState):
    """Reads a run's events.jsonl once, and then the appended lines.

    One thread calls `refresh`, or `fetch` and `take`. Other threads hold `lock` while they read the state.

    For a long log, the beginning and the end are read first, so that the newest step is shown immediately. The rest is
    read into a second state in the background, which then replaces the first.
    """

    def __init__(self, folder: Path, name: str):
        super().__init__()
        self.folder, self.name = folder, name
        self.lock = threading.RLock()
        self.version = 0
        self.measured: dict[str, Any] = {}
        self.tail = LogTail(folder / "events.jsonl")
        self._old: LogTail | None = None
        self._old_state = RunState()
        self._trouble, self._measured_at = "", 0

    def refresh(self) -> bool:
        """Read the next chunk of the log, and return True if there was anything new."""
        found = self.fetch()
        return found is not None and self.take(found)

    def fetch(self) -> _Fetched | None:
        """Read and return the next chunk, or None if nothing is new. Called from one thread.

        It advances the positions in the files, and does not change the run's state.

        All file system access is in this method, so that the lock is not held during a call that hangs.
        """
        measured = self._new_measured()
        if not self.tail.changed() and self._old is None:
            return None if measured is None else _Fetched([], measured=measured)
        if self.tail.offset == 0 and self.tail.size > _LONG_LOG:
            begin, _ = LogTail(self.tail.path).read(_BEGIN_BYTES)
            self.tail.skip_to_last(_NEWEST_BYTES)
            newest, _ = self.tail.read()
            self._old = LogTail(self.tail.path)
            return _Fetched(begin + newest, measured=measured)
        lines, void = self.tail.read()
        if void or self._old is None:
            return _Fetched(lines, void, measured=measured)
        return _Fetched(lines, void, *self._old.read(), measured=measured)

    def take(self, found: _Fetched) -> bool:
        """Add the result of `fetch`, and return True if it changed anything."""
        events, old = decode(found.lines), decode(found.old)
        trouble = self.tail.trouble
        if trouble and trouble == self._trouble and not found.void and found.measured is None:
            return False
        with self.lock:
            self._trouble = trouble
            if found.void or found.old_void:
                vars(self).update(vars(RunState()))
                self._old, self._old_state = None, RunState()
                if found.old_void:
                    self.tail = LogTail(self.tail.path)
            self.feed(events, with_ledger=self._old is None)
            if self._old is not None and not found.void:
                self._old_state.feed(old)
                self.ledger = self._old_state.ledger
                if self._old.offset >= self.tail.offset:
                    vars(self).update(vars(self._old_state))
                    self.tail, self._old, self._old_state = self._old, None, RunState()
            if found.measured is not None:
                self.measured = found.measured
            self.version += 1
        return True

    def set_trouble(self, text: str) -> None:
        """Set the reason why the log cannot be read, or ""."""
        if text != self._trouble:
            with self.lock:
                self._trouble = text
                self.version += 1

    def _new_measured(self) -> dict[str, Any] | None:
        """Return the values of the run's measured.json, {} if unreadable, or None if unchanged since the last call."""
        path = self.folder / "measured.json"
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            written = 0
        if written == self._measured_at:
            return None
        self._measured_at = written
        try:
            with open_regular(path) as file:
                text = file.read(_LONGEST_MEASURED + 1)
            found = json.loads(text) if len(text) <= _LONGEST_MEASURED else None
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def read_share(self) -> float:
        """Share of the log that has been read, 0 to 1."""
        offset, size = (self._old or self.tail).offset, self.tail.size
        return min(1.0, offset / size) if size else 1.0

    def state(self, now: float | None = None) -> tuple[str, str]:
        """Return the state and its reason: running, starting, silent, held, failed, stopped or finished.

        The state is "unreadable" if the log cannot be read now.
        """
        return ("unreadable", f"events.jsonl: {self._trouble}") if self._trouble else super().state(now)


# All runs below a folder, and the thread that reads their logs.

#: Seconds between two scans for runs, and between two reads of their logs.
_SCAN_S, _LOOK_S = 5.0, 0.4
#: Time limit (s) of an access to one folder.
_LIMIT_S = 2.0
#: Maximum number of runs on one page; the newest are listed.
_MOST_RUNS = 500


class RunCatalog:
    """The runs of a folder: the folder itself, or the newest 500 runs up to two levels below it.

    Raises:
        ConfigError: if there is no run, or if the folder does not answer within 2 s.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self._calls = TimedCalls(_LIMIT_S)
        try:
            self.is_one = self._calls.call("root", (self.root / "events.jsonl").is_file)
        except Late:
            raise ConfigError(
                f"{str(root)!r}: this folder does not answer within {_LIMIT_S:.0f} s. Check its file system."
            ) from None
        self._runs: dict[str, RunIndex] = {}
        self._is_expected: str | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.scan()
        if not self._runs:
            raise ConfigError(
                f"{str(root)!r}: there is no run in it (no events.jsonl). Give a run folder, such as runs/quickstart, "
                f"or the folder of your runs; `weft train` writes both."
            )

    @property
    def runs(self) -> dict[str, RunIndex]:
        """Runs by path relative to the folder, newest first."""
        return dict(self._runs)

    def get(self, name: str) -> RunIndex | None:
        """Return one run, or None if the name is unknown. From now on, it is read before the others."""
        found = self._runs.get(name)
        if found is not None:
            self._is_expected = name
        return found

    def scan(self) -> None:
        """Find the runs. If a folder does not respond, its previous runs are kept."""
        if self.is_one:
            found = {self.root.resolve().name or "run": self.root}
        else:
            try:
                folders = self._calls.call("the root", functools.partial(_folders, self.root))
            except (Late, OSError):
                return
            logs = [log for folder in folders for log in self._logs_in(folder)]
            newest = sorted(logs, reverse=True, key=lambda one: one[0])[:_MOST_RUNS]
            found = {path.relative_to(self.root).as_posix(): path for _, path in newest}
        self._runs = {name: self._runs.get(name) or RunIndex(path, name) for name, path in found.items()}

    def _logs_in(self, folder: Path) -> list[tuple[float, Path]]:
        try:
            return self._calls.call(f"logs in {folder}", functools.partial(_logs, folder))
        except OSError:
            return []
        except Late:
            known = (run.folder for run in self._runs.values())
            return [(math.inf, one) for one in known if folder in (one, *one.parents)]

    def refresh(self) -> bool:
        """Read the log of the run that `get` returned last to its end, then a chunk of each other log.

        Return True if there was anything new.
        """
        runs = dict(self._runs)
        wanted = runs.pop(self._is_expected or "", None)
        changed = False
        while wanted is not None and not self._end.is_set() and self._refresh(wanted):
            changed = True
            if wanted.read_share >= 1:
                break
        for run in runs.values():
            changed = self._refresh(run) or changed
        return changed

    def _refresh(self, run: RunIndex) -> bool:
        try:
            found = self._calls.call(run.name, run.fetch)
        except Late:
            run.set_trouble(f"its file system does not answer within {_LIMIT_S:.0f} s")
            return False
        if found is None:
            run.set_trouble(run.tail.trouble)
            return False
        return run.take(found)

    def read_all(self) -> None:
        """Read every log to its end."""
        while self.refresh():
            pass

    def start(self) -> None:
        """Keep reading in a thread until `close`."""
        self._thread = threading.Thread(target=self._keep_reading, name="weft-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5.0)
        self._calls.close()

    def _keep_reading(self) -> None:
        scanned = time.monotonic()
        while not self._end.is_set():
            try:
                changed = self.refresh()
                if time.monotonic() - scanned > _SCAN_S:
                    self.scan()
                    scanned = time.monotonic()
            except Exception:  # A log that cannot be read must not end the page of the others.
                traceback.print_exc()
                changed = False
            self._end.wait(0.005 if changed else _LOOK_S)


def _folders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) or entry.is_symlink()]


def _logs(folder: Path) -> list[tuple[float, Path]]:
    """Return (time of the last write, path) of the run folders in `folder`, including itself."""
    found: list[tuple[float, Path]] = []
    for run in (folder, *_folders(folder)):
        with contextlib.suppress(OSError):
            found.append(((run / "events.jsonl").stat().st_mtime, run))
    return found
