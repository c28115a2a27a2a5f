"""Comparison of a run with its plan during training, and the time report after it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.connect import transports
from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.monitor.events import StepRecord
from weft.monitor.step_times import TimeBook, chrome_trace, draw_times, memory_bytes, time_lines
from weft.parallel.pipeline.runtime import Pipeline, pipeline_of
from weft.planner.cost.pipeline import Durations, Timeline, simulate
from weft.planner.measured.laws import measured_parts, parts_of
from weft.train.folder import RunFolder
from weft.train.hooks import Hook
from weft.train.planned import drifts, expect, expectation_lines
from weft.train.tasks.base import Task
from weft.units import format_seconds

#: Steps before the first comparison, and steps and seconds between two comparisons.
_FIRST, _EVERY, _EVERY_S = 20, 50, 30.0


class PlanWatch(Hook):
    """Writes the estimate as an event "plan", measurements as "actual", and deviations as "drift".

    Args:
        expected: the planner's estimate of one step.
        on_gpu: measured memory is comparable with the estimate. On a CPU it covers the whole process.
        book: this rank's times.
        write: receives an event.
        warn: receives a step and a line for users.
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
    def of(
        cls,
        task: Task,
        plan: Plan,
        device: str,
        book: TimeBook,
        write: Callable[[Mapping[str, object]], None],
        warn: Callable[[int, str], None],
    ) -> PlanWatch | None:
        """Return the hook of a run, or None if its machine is unknown.

        Args:
            task: the run's task.
            plan: the run's plan.
            device: this rank's device.
            book: this rank's times.
            write: receives an event.
            warn: receives a step and a line for users.
        """
        expected, _ = expect(task, plan, device)
        return None if expected is None else cls(expected, device.startswith("cuda"), book, write, warn)

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
        figures: dict[str, float] = {"step_s": step_s, "memory.bytes": float(expected["memory_bytes"])}
        if step_s > 0:
            figures["tokens_per_s"] = record.count / step_s
        return {
            "event": "plan",
            "basis": expected["basis"],
            "step_s": step_s,
            "memory_bytes": expected["memory_bytes"],
            "parts": self._planned,
            "terms": {name: seconds for name, seconds in expected["terms"].items() if seconds > 0},
            "figures": figures,
        }

    def _compare(self, record: StepRecord) -> None:
        measured = measured_parts(self._book.typical())
        if not measured:
            return
        # The plan's computation time includes Python between kernels.
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
        """Return measured / planned for the step, for its parts of at least 2 %, and for memory."""
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


# Time report after training: rank 0 gathers all times, and writes text, a figure and a trace.

#: (name, start, end) in seconds.
Span = tuple[str, float, float]
#: Maximum number of ranks in a trace of the last step.
_MOST_TRACED = 64
#: Ratio of waiting time to the measured link time above which the report suggests a cause.
_FAR = 1.5


@dataclass(frozen=True, slots=True)
class _ReportedTimes:
    """The times of all ranks since one start."""

    num_steps: int
    start_step: int
    ranks: Sequence[Mapping[str, Any]]


def report_times(
    folder: RunFolder,
    mesh: Mesh,
    model: nn.Module,
    book: TimeBook,
    task: Task,
    start_step: int = 0,
) -> list[str]:
    """Write times.svg and trace.json into the run folder and return the report. A collective.

    The report is empty on ranks other than 0, and if no step was done.

    Args:
        folder: the run's folder.
        mesh: the mesh of the ranks.
        model: the trained model.
        book: this rank's times.
        task: the run's task, for the planner's estimate.
        start_step: first step of this start. The times cover only this start.
    """
    if not book.num_steps:
        return []
    pipeline = pipeline_of(model)
    is_traced = mesh.rank < _MOST_TRACED
    ranks = _gathered(
        {
            "seconds": book.seconds(),
            "typical": book.typical(),
            "steps": book.num_steps,
            "memory": memory_bytes(mesh.device)[1],
            "spans": book.last.spans() if book.last and is_traced else [],
            "actions": [(str(a), start, end) for a, start, end in pipeline.events] if pipeline and is_traced else [],
        },
        mesh,
    )
    if mesh.rank:
        return []
    try:
        return _written(folder, task, mesh, pipeline_of(model), _ReportedTimes(book.num_steps, start_step, ranks))
    except Exception as error:  # The run is saved, so a failing report must not fail it.
        traceback.print_exc()
        return [f"time    no report ({type(error).__name__}: {error}; the traceback is in the log of rank 0)"]


def _written(
    folder: RunFolder,
    task: Task,
    mesh: Mesh,
    pipeline: Pipeline | None,
    said: _ReportedTimes,
) -> list[str]:
    """Write the figures and return the report."""
    ranks, num_steps, start_step = said.ranks, said.num_steps, said.start_step
    seconds = [one["seconds"] for one in ranks]
    sizes = mesh.plan.axis_sizes()
    (folder.path / "times.svg").write_text(draw_times(seconds, num_steps, sizes, start_step))
    tracks = [("phases", f"rank {rank}", one["spans"]) for rank, one in enumerate(ranks) if one["spans"]]
    tracks += [("pipeline", f"rank {rank}", one["actions"]) for rank, one in enumerate(ranks) if one["actions"]]
    lines = time_lines(seconds, num_steps, sizes, start_step)
    if pipeline and (lists := [one["actions"] for one in ranks if one["actions"]]):
        timeline = _on_a_clock(pipeline, lists)
        tracks += _planned(pipeline, timeline)
        lines.append(_bubble_line(pipeline, timeline, lists))
    (folder.path / "trace.json").write_text(chrome_trace(tracks))
    beside = expectation_lines(folder.path, task, mesh, ranks)
    lines += _link_lines(mesh, seconds[0])
    return [*lines, "        times.svg: by rank; trace.json: the last step, for Perfetto", *beside]


def _link_lines(mesh: Mesh, seconds: Mapping[str, float]) -> list[str]:
    """Return lines about the transport of each axis of rank 0, with the reason. Axes with the same text share a line.

    If links were measured, a line also compares the expected time of the calls with the waiting time.

    Args:
        mesh: the mesh of the ranks.
        seconds: seconds of rank 0 by kind.
    """
    names: dict[tuple[int, ...], str] = {}
    waited: dict[tuple[int, ...], float] = {}
    for axis in reversed(mesh.built_axes()):
        names[axis.ranks] = axis.label
        waited[axis.ranks] = waited.get(axis.ranks, 0.0) + seconds.get(f"over {axis.name}", 0.0)
    alike: dict[str, list[str]] = {}
    for one in transports(mesh):
        axis = names.get(one.ranks, f"ranks {', '.join(map(str, one.ranks))}")
        words = f"{one.transport}, since {one.reason}"
        if one.planned_s:
            words += _incompatible_setting(one.planned_s, waited.get(one.ranks, 0.0))
        alike.setdefault(words, []).append(axis)
    return [f"        {', '.join(dict.fromkeys(axes))}: by {words}" for words, axes in alike.items()]


def _incompatible_setting(planned_s: float, waited_s: float) -> str:
    """Describe the expected seconds of an axis's calls by link measurements, and the waiting time."""
    told = f"; by measurement its calls take {format_seconds(planned_s)}, steps waited {format_seconds(waited_s)}"
    if waited_s < _FAR * planned_s:
        return told
    return (
        f"{told}, {waited_s / planned_s:.1f} times as long: ranks were late, or measure again (weft calibrate --hosts)"
    )


def _on_a_clock(pipeline: Pipeline, lists: list[list[Span]]) -> Timeline:
    """Simulate the schedule with the mean measured duration of each kind of action and free communication."""
    took: dict[str, list[float]] = {}
    for name, start, end in (action for actions in lists for action in actions):
        took.setdefault(name.rstrip("0123456789.") or name, []).append(end - start)
    mean = {kind: sum(found) / len(found) for kind, found in took.items()}
    weight = mean.get("W", 0.0)
    durations = Durations(mean.get("F", 0.0), mean.get("B", max(0.0, mean.get("BW", 0.0) - weight)), weight)
    return simulate(pipeline.schedule, durations)


def _bubble_line(pipeline: Pipeline, timeline: Timeline, lists: list[list[Span]]) -> str:
    """Report the idle fraction of the last step: the schedule's own, and the measured one."""
    planned = sum(timeline.idle_s) / (len(timeline.idle_s) * timeline.makespan_s)
    span = max(actions[-1][2] for actions in lists)
    busy = sum(end - start for actions in lists for _, start, end in actions)
    return (
        f"        last step: {pipeline.schedule.name} by itself leaves {planned:.0%} of it idle; "
        f"measured: {1 - busy / (len(lists) * span):.0%}"
    )


def _planned(pipeline: Pipeline, timeline: Timeline) -> list[Any]:
    """Return the tracks of the simulated schedule, for comparison with the measured ones."""
    return [
        (
            "schedule",
            f"rank {rank}",
            [
                (str(step), start, end)
                for step, start, end in zip(steps, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
            ],
        )
        for rank, steps in enumerate(pipeline.schedule.ranks)
    ]


def _gathered(mine: dict[str, Any], mesh: Mesh) -> list[dict[str, Any]]:
    """Gather a JSON value from each rank on rank 0, in rank order. Called once per run."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(mesh.device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=mesh.device), mesh.world, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    rows = all_gather(padded, mesh.world).view(mesh.world.size, -1).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows] if mesh.rank == 0 else []
