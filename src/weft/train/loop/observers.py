"""Hooks of a run: metrics of each rank, requests, rollback, the event log, drift from the plan, and the time limit."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints
from weft.checkpoint.prune import set_aside
from weft.comm.rank_positions import members_of
from weft.config.metrics import series
from weft.config.plan import Plan
from weft.env import RankEnv
from weft.errors import ConfigError
from weft.files import replace_text
from weft.monitor.alerts import RequestQueue, RunRequest, action_line
from weft.monitor.events import EventLog, StepRecord, read_events
from weft.monitor.live import Display
from weft.monitor.machine_metrics import GpuSource, HostSource
from weft.monitor.metrics import Collector, StepReport
from weft.monitor.plots import Artist, plot_loss
from weft.monitor.step_times import TimeBook
from weft.monitor.stragglers import Advisor
from weft.planner.measured.corrections import measured_parts, parts_of
from weft.train.engine import Engine, Evaluation
from weft.train.folder import RunFolder
from weft.train.hooks import Hook, SaveEnd, leave_out
from weft.train.loop.energy_hook import EnergyReports
from weft.train.loop.reporting import sample_digests
from weft.train.planned import drifts, expect
from weft.train.tasks.base import Task

#: Memory series of a rank: its peak, and the part of it that no other series covers.
_PEAK, _REST = series("memory.bytes", "peak"), series("memory.bytes", "rest")


class MetricHook(Hook):
    """Hook that starts a rank's metric `Collector` with sources for engine, machine and GPU.

    Args:
        engine: this rank's engine.
        place: rank environment of this process; None for a single process.
        folder: the run's folder.
        every_s: seconds between reports.
        recorder: on rank 0, receives the metric events of all ranks, and events about ranks that become slow or
            recover.
        energy: reads this machine's energy, on one rank of each machine.
        advisor: on rank 0, proposes shares if a rank is slow.
    """

    def __init__(
        self,
        engine: Engine,
        place: RankEnv | None,
        folder: Path,
        every_s: float,
        recorder: NullRecorder,
        energy: EnergyReports | None = None,
        advisor: Advisor | None = None,
    ):
        measures, plan, is_first = engine.reports.measures(), engine.plan, engine.rank == 0
        host = HostSource(folder, with_machine=place is None or place.local_rank == 0)
        gpu = [GpuSource(measures.gpu).read] if measures.gpu else []
        self._measures, self._on_gpu = measures, measures.gpu is not None
        self._memory: dict[str, float] = {}
        self._peak = 0
        self._num_steps = 0
        self.collector = Collector(
            os.uname().nodename,
            measures.board,
            every_s,
            of_rank=[host.of_process, *gpu, self._memory_now],
            of_host=[host.of_machine, *([energy.of_host] if energy else [])],
            totals=measures.traffic,
            publish=(energy or recorder).on_metrics if is_first else None,
            # Compare only ranks of the same pipeline stage, because stages do different work. Only rank 0 compares.
            groups=[members_of(plan, rank, ("pp",)).index(rank) for rank in range(plan.world_size if is_first else 0)],
            on_slow=recorder.on_slow if is_first else None,
            advisor=advisor,
        )

    def on_start(self, start_step: int) -> None:
        self.collector.start()

    def on_step(self, record: StepRecord) -> str | None:
        self._num_steps += 1
        self._peak = record.memory_bytes
        if self._num_steps == 2:
            # After the first step all tensors exist, and memory stays constant between two steps, so read it now.
            self._memory = dict(self._measures.memory())
        self.collector.put(
            StepReport(record.step, record.seconds, record.exposed, record.busy_s, record.data_s, record.own)
        )
        return None

    def on_end(self, step: int, reason: str) -> None:
        self.collector.close()

    def _memory_now(self) -> Mapping[str, float]:
        """Return memory in bytes by metric name. On a GPU, `_REST` is the part of the peak that no other one covers."""
        found, peak = self._memory, float(self._peak)
        if not peak:
            return found
        # On a CPU the peak covers the whole process, including libraries, so the rest would be meaningless.
        rest = {_REST: max(0.0, peak - sum(found.values()))} if found and self._on_gpu else {}
        return {**found, **rest, _PEAK: peak}


# Rollback: resuming from a checkpoint before a problem, a limited number of times.

#: File with the number of rollbacks to each step.
_COUNTS = "rolled_back.json"
#: Maximum number of rollbacks to a step. Without skipping data the result is the same each time, so 1 is enough.
_MOST = {"roll_back": 1, "skip_data": 3}


def roll_back(folder: RunFolder, wish: RunRequest, step: int) -> int | None:
    """Set aside the checkpoints since the problem, and for skip_data skip its data. Runs on rank 0 after saves.

    Returns the step from which the next start resumes. Returns None and changes nothing if there is no older
    checkpoint, or if the run has rolled back to it too often.

    Args:
        folder: the run's folder.
        wish: a request of a user or an alert, roll_back or skip_data.
        step: steps done.
    """
    since = min(wish.since or step, step)
    saved = [known for path in list_checkpoints(folder.checkpoints) if (known := step_in_name(path.name)) is not None]
    target = max((known for known in saved if known < since), default=None)
    counts = _counts(folder)
    if target is None or counts.get(str(target), 0) >= _MOST[wish.action]:
        return None
    set_aside(folder.checkpoints, lambda one: one.step > target)
    if wish.action == "skip_data":
        leave_out(folder, range(since, step + 1))
    counts[str(target)] = counts.get(str(target), 0) + 1
    replace_text(folder.path / _COUNTS, json.dumps(counts) + "\n")
    return target


def _counts(folder: RunFolder) -> dict[str, int]:
    try:
        return {str(step): int(count) for step, count in json.loads((folder.path / _COUNTS).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


# A thread of rank 0 that reads requests from users, and makes all ranks handle them after the next step.

_LOOK_S = 0.25


class RequestWatch(threading.Thread):
    """Polls for requests four times per second. The loop calls `take` to get them.

    Args:
        folder: the run's folder.
        since: time at which the command started, in seconds since 1970; older requests are ignored.
        engine: the engine, held by a weak reference: model and groups must be freed before the ranks disconnect.
    """

    def __init__(self, folder: Path, since: float, engine: Engine):
        super().__init__(name="weft-wishes", daemon=True)
        self._box, self._engine = RequestQueue(folder, since), weakref.ref(engine)
        self._heard: deque[RunRequest] = deque()
        self._end = threading.Event()

    def take(self) -> list[RunRequest]:
        """Return the requests since the last call."""
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def look(self) -> None:
        """Read new requests once. If there are any, set `engine.asks`."""
        found, engine = self._box.new(), self._engine()
        self._heard.extend(found)
        if found and engine is not None:
            engine.asks = True

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self.is_alive():
            self.join(5.0)

    def run(self) -> None:
        """Read requests in a loop until `close` is called."""
        while not self._end.wait(_LOOK_S):
            self.look()


# The main hook of rank 0: writes events.jsonl, draws loss.png, and shows progress on the terminal.


class NullRecorder(Hook):
    """The recorder of ranks other than 0, which writes and shows nothing."""

    display: Display | None = None

    def on_note(self, step: int, text: str) -> None:
        """Show a line whose content is already in another event."""

    def on_metrics(self, event: Mapping[str, object]) -> None:
        """Write a metrics event. Called by the monitoring thread."""

    def on_slow(self, event: Mapping[str, object]) -> None:
        """Write and show an event about a slow rank. Called by the monitoring thread."""

    def draw(self) -> None:
        """Draw the loss plot of the full run. This takes seconds, so call it when no other rank is waiting."""

    def close(self) -> None:
        """Close the display, the plotting process and the event log."""


class RunRecorder(NullRecorder):
    """Writes events to the run folder and passes them to the display.

    Args:
        folder: the run's folder.
        task: the run's task.
        display: the terminal's display.
        start: fields of the start event.
    """

    def __init__(self, folder: RunFolder, task: Task, display: Display, start: dict[str, object]):
        self._folder, self._task = folder, task
        self.display = self._display = display
        self._goes_on = folder.events.exists()
        self._log = EventLog(folder.events)
        self._start = start
        self._artist = Artist(folder.events, folder.loss_plot, folder.path.name)
        self._saved: int | None = None
        self._is_full = False

    def on_start(self, start_step: int) -> None:
        if self._goes_on:
            # Readers of the log discard earlier events beyond this step, because those steps are repeated.
            self._log.write({"event": "resume", "step": start_step})
        self._log.write({"event": "start", "step": start_step, **self._start})
        self._saved = start_step or None

    def on_phase(self, name: str) -> None:
        self._display.phase(name)

    def on_step(self, record: StepRecord) -> str | None:
        self._log.write(record.to_event())
        self._report_disk_space()
        self._display.step(record)
        if (usual := record.usual_loss) is not None:
            back = f", or go back with resume.step={self._saved}" if self._saved else ""
            self.on_warning(
                record.step,
                f"step {record.step}: the loss jumped to {record.loss:.4g}; {usual:.4g} is typical of recent steps. "
                f"If it stays high, lower optimizer.lr or optimizer.max_grad_norm{back}.",
            )
        self._artist.draw_when_late()
        return None

    def _report_disk_space(self) -> None:
        if (is_full := self._log.num_waiting > 0) != self._is_full:
            self._is_full = is_full
            name, at = self._folder.events.name, self._folder.path
            self._display.note(
                f"run.dir={at}: the disk is full. Training continues, and {name} is written when there is space."
                if is_full
                else f"run.dir={at}: there is space again, and {name} is written."
            )

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        found = evaluation.metrics
        event = {"event": "eval", "step": step, "loss": evaluation.loss, **found, self._task.unit: evaluation.count}
        self._log.write(event)
        shown = [(found.get(metric.name), metric.label) for metric in self._task.metrics]
        self._display.evaluation(step, evaluation.loss, [(value, label) for value, label in shown if value is not None])
        self._artist.draw_soon()
        return None

    def on_warning(self, step: int, text: str) -> None:
        self._log.write({"event": "warning", "step": step, "text": text})
        self._display.note(text)

    def on_trace(self, event: Mapping[str, object]) -> None:
        self._log.write({**event, "seen": sample_digests(self._task, event)})
        self._display.note(f"step {event['step']}: {event['text']}.")
        self._display.note(f"weft runs explain {self._folder.path} --step {event['step']} shows the samples.")

    def on_action(self, step: int, wish: RunRequest) -> None:
        if wish.action != "tell":
            told = {"action": wish.action, "why": wish.why, "by": wish.by, "since": wish.since}
            self._log.write({"event": "action", "step": step, **{key: one for key, one in told.items() if one}})
        self._display.note(action_line(step, wish))

    def on_note(self, step: int, text: str) -> None:
        self._display.note(text)

    def on_metrics(self, event: Mapping[str, object]) -> None:
        self._log.write(event)

    def on_slow(self, event: Mapping[str, object]) -> None:
        self._log.write(event)
        self._display.note(f"step {event['step']}: {event['text']}.")

    def on_shares(self, step: int, shares: str) -> None:
        text = f"from the next step on, the data-parallel ranks have shares={shares}"
        self._log.write({"event": "shares", "step": step, "shares": shares, "text": text})
        self._display.note(f"step {step}: {text}.")

    def on_moved(self, before: int, step: int) -> None:
        if step < before:  # readers discard events beyond this step
            self._log.write({"event": "resume", "step": step})

    def on_checkpoint(self, saved: SaveEnd) -> None:
        assert saved.path is not None
        times = {"stall_s": round(saved.stall_s, 4), "durable_s": round(saved.durable_s, 4)}
        if saved.is_copy:
            self._log.write({"event": "copy", "step": saved.step, **times})
            return
        self._log.write({"event": "checkpoint", "step": saved.step, "path": saved.path.name, **times})
        self._saved = saved.step
        self._artist.draw_soon()

    def on_end(self, step: int, reason: str) -> None:
        self._log.write({"event": "end", "step": step, "reason": reason})

    def draw(self) -> None:
        self._artist.close()
        events = list(read_events(self._folder.events))
        if any(event["event"] == "step" for event in events):  # a run may pause in its first step
            plot_loss(events, self._folder.loss_plot, title=str(self._folder.path.name))

    def close(self) -> None:
        self._display.close()
        self._artist.close()
        self._log.close()


# Comparison of a run with its plan during training.

#: Steps before the first comparison; steps and seconds between comparisons.
_FIRST, _EVERY, _EVERY_S = 20, 50, 30.0


class PlanWatch(Hook):
    """Hook that writes the planner's estimate as event "plan", measurements as "actual", and deviations as "drift".

    Args:
        expected: the planner's estimate of one step.
        on_gpu: True if measured memory is comparable with the estimate. On a CPU it covers the whole process.
        book: this rank's times.
        write: called with an event.
        warn: called with a step and a line for users.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        expected: Mapping[str, Any],
        on_gpu: bool,
        book: TimeBook,
        write: Callable[[Mapping[str, object]], None],
        warn: Callable[[int, str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self._expected, self._on_gpu, self._book = expected, on_gpu, book
        self._write, self._warn, self._now = write, warn, now
        self._planned = parts_of(expected["terms"])
        self._num_steps = 0
        self._looked_at, self._looked = 0, now()
        self._drifted: frozenset[str] = frozenset()

    @property
    def step_s(self) -> float:
        """Planned seconds per step."""
        return float(self._expected["step_s"])

    @classmethod
    def of(cls, task: Task, plan: Plan, device: str, book: TimeBook, recorder: NullRecorder) -> PlanWatch | None:
        """Return the hook of a run, or None if the planner has no estimate for it.

        Args:
            task: the run's task.
            plan: the run's plan.
            device: this rank's device.
            book: this rank's times.
            recorder: receives the events, and lines for users.
        """
        expected, _ = expect(task, plan, device)
        if expected is None:
            return None
        return cls(expected, device != "cpu", book, recorder.on_metrics, recorder.on_note)

    def on_step(self, record: StepRecord) -> str | None:
        """Count the step, and compare with the plan if due."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._write(self._plan_event(record))
        since = self._num_steps - self._looked_at
        again = since >= _EVERY and self._now() - self._looked >= _EVERY_S
        if again if self._looked_at else since >= _FIRST:
            self._looked_at, self._looked = self._num_steps, self._now()
            self._compare(record)
        return None

    def _plan_event(self, record: StepRecord) -> dict[str, object]:
        expected, step_s = self._expected, float(self._expected["step_s"])
        metrics: dict[str, float] = {"step_s": step_s, "memory.bytes": float(expected["memory_bytes"])}
        if step_s > 0:
            metrics["tokens_per_s"] = record.count / step_s
        return {
            "event": "plan",
            "basis": expected["basis"],
            "step_s": step_s,
            "memory_bytes": expected["memory_bytes"],
            "parts": self._planned,
            "terms": {name: seconds for name, seconds in expected["terms"].items() if seconds > 0},
            "figures": metrics,
        }

    def _compare(self, record: StepRecord) -> None:
        measured = measured_parts(self._book.typical())
        if not measured:
            return
        # The planner's compute time includes the time of Python between kernels.
        measured["compute"] = measured.get("compute", 0.0) + measured.pop("host", 0.0)
        memory = (float(self._expected["memory_bytes"]), float(record.memory_bytes)) if self._on_gpu else None
        found = drifts(self._planned, measured, memory, self._drifted)
        self._write(
            {
                "event": "actual",
                "step": record.step,
                "step_s": round(sum(measured.values()), 6),
                "memory_bytes": record.memory_bytes,
                "parts": {part: round(seconds, 6) for part, seconds in measured.items()},
                "drift": [f"{one.text}." for one in found],
                "ratios": self._ratios(measured, memory),
            }
        )
        for one in found:
            if one.what not in self._drifted:
                self._write({"event": "drift", "step": record.step, "what": one.what, "ratio": round(one.ratio, 3),
                             "text": one.text})  # fmt: skip
                self._warn(record.step, f"step {record.step} beside the plan: {one.text}")
        self._drifted = frozenset(one.what for one in found)

    def _ratios(self, measured: Mapping[str, float], memory: tuple[float, float] | None) -> dict[str, float]:
        step = sum(self._planned.values())
        ratios = {"step": sum(measured.values()) / step} if step > 0 else {}
        ratios |= {
            part: measured[part] / seconds
            for part, seconds in self._planned.items()
            if part in measured and seconds >= 0.02 * step
        }
        if memory is not None and memory[0] > 0:
            ratios["memory"] = memory[1] / memory[0]
        return {name: round(ratio, 4) for name, ratio in ratios.items()}


# The time limit of a run.

#: Number of recent steps. Their maximum predicts later steps, so that an old slow step does not count forever.
_RECENT = 50
#: Assumed write speed in bytes per second before the first checkpoint.
_ASSUMED_SPEED = 100e6
#: Seconds from the last save to the end of the process: plots, the report, disconnecting.
_CLOSING_S = 10.0


class TimeLimit(Hook):
    """Hook that requests a stop before the time limit. It runs on one rank; all ranks stop after the same step.

    `on_start` raises ConfigError if the time limit is over.

    Args:
        text: the limit as the user typed it.
        deadline: time of `clock` at which the limit ends, in seconds.
        checkpoint_bytes: size of a checkpoint.
        steps_to_stop: maximum number of steps after the request.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        text: str,
        deadline: float,
        checkpoint_bytes: int,
        *,
        steps_to_stop: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._text, self._deadline, self._clock = text, deadline, clock
        self._steps_to_stop = steps_to_stop
        self._save_s = checkpoint_bytes / _ASSUMED_SPEED
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0
        self._last = 0.0
        self._evaluated_s = 0.0
        self.reason = ""

    def on_start(self, start_step: int) -> None:
        self._last = self._clock()
        late = self._last - self._deadline
        if late >= 0:
            raise ConfigError(
                f"train.max_time={self._text}: the time ran out {late:.0f} s before the first step. "
                f"Use a longer time, or leave it out."
            )

    def on_step(self, record: StepRecord) -> str | None:
        now = self._clock()
        self._steps.append(record.seconds["total"])
        # Time between two steps, except evaluation: waiting for data, and saving if a save was due.
        self._save_s = max(self._save_s, now - self._last - record.seconds["total"] - self._evaluated_s)
        self._last, self._evaluated_s = now, 0.0
        # The first step of a start includes setup, so it does not predict later ones.
        longest = max(list(self._steps)[1:] or self._steps)
        # The other ranks receive the request in the next step, and an evaluation may happen before it.
        if now + self._steps_to_stop * longest + self._evaluation_s + self._save_s + _CLOSING_S < self._deadline:
            return None
        self.reason = f"train.max_time={self._text} is nearly used up"
        return self.reason

    def on_checkpoint(self, saved: SaveEnd) -> None:
        self._save_s = max(self._save_s, saved.durable_s)  # training waits for the last one

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        self._evaluated_s = self._clock() - self._last
        self._evaluation_s = max(self._evaluation_s, self._evaluated_s)
