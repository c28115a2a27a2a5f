"""Time report after training: rank 0 gathers all times, and writes text, a figure and a trace."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.connect import transports
from weft.comm.mesh import Mesh
from weft.monitor.step_times import TimeBook, chrome_trace, draw_times, memory_bytes, time_lines
from weft.parallel.pipeline.runtime import Pipeline, pipeline_of
from weft.planner.cost.pipeline import Durations, Timeline, simulate
from weft.train.folder import RunFolder
from weft.train.planned import expectation_lines
from weft.train.tasks.base import Task
from weft.units import format_seconds

#: (name, start, end) in seconds.
Span = tuple[str, float, float]
#: Maximum number of ranks in a trace of the last step.
_MOST_TRACED = 64
#: Ratio of waiting time to the measured link time above which the report suggests a cause.
_FAR = 1.5


@dataclass(frozen=True, slots=True)
class _ReportedTimes:
    num_steps: int
    start_step: int
    ranks: Sequence[Mapping[str, Any]]


def report_times(
    folder: RunFolder, mesh: Mesh, model: nn.Module, book: TimeBook, task: Task, start_step: int = 0
) -> list[str]:
    """Write times.svg and trace.json into the run folder and return the report. All ranks must call it.

    The report is empty on ranks other than 0, and if no step was done. If it fails, it is one line with the error.

    Args:
        folder: the run's folder.
        mesh: the mesh of the ranks.
        model: the trained model.
        book: this rank's times.
        task: the run's task, for the planner's estimate.
        start_step: steps done by earlier starts. The times cover only this start.
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


def _written(folder: RunFolder, task: Task, mesh: Mesh, pipeline: Pipeline | None, said: _ReportedTimes) -> list[str]:
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
    """Return lines about the transport of each axis of rank 0, with the reason. Axes with equal text share a line."""
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
            words += _versus_estimate(one.planned_s, waited.get(one.ranks, 0.0))
        alike.setdefault(words, []).append(axis)
    return [f"        {', '.join(dict.fromkeys(axes))}: by {words}" for words, axes in alike.items()]


def _versus_estimate(planned_s: float, waited_s: float) -> str:
    """Compare the time that waits for an axis's collectives took with the estimate from link measurements."""
    told = f"; by measurement its calls take {format_seconds(planned_s)}, steps waited {format_seconds(waited_s)}"
    if waited_s < _FAR * planned_s:
        return told
    return (
        f"{told}, {waited_s / planned_s:.1f} times as long: ranks were late, or measure again (weft calibrate --hosts)"
    )


def _on_a_clock(pipeline: Pipeline, lists: list[list[Span]]) -> Timeline:
    took: dict[str, list[float]] = {}
    for name, start, end in (action for actions in lists for action in actions):
        took.setdefault(name.rstrip("0123456789.") or name, []).append(end - start)
    mean = {kind: sum(found) / len(found) for kind, found in took.items()}
    weight = mean.get("W", 0.0)
    durations = Durations(mean.get("F", 0.0), mean.get("B", max(0.0, mean.get("BW", 0.0) - weight)), weight)
    return simulate(pipeline.schedule, durations)


def _bubble_line(pipeline: Pipeline, timeline: Timeline, lists: list[list[Span]]) -> str:
    planned = sum(timeline.idle_s) / (len(timeline.idle_s) * timeline.makespan_s)
    span = max(actions[-1][2] for actions in lists)
    busy = sum(end - start for actions in lists for _, start, end in actions)
    return (
        f"        last step: {pipeline.schedule.name} by itself leaves {planned:.0%} of it idle; "
        f"measured: {1 - busy / (len(lists) * span):.0%}"
    )


def _planned(pipeline: Pipeline, timeline: Timeline) -> list[Any]:
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
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(mesh.device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=mesh.device), mesh.world, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    rows = all_gather(padded, mesh.world).view(mesh.world.size, -1).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows] if mesh.rank == 0 else []
