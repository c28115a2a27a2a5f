"""Pictures of several runs: their curves on one plot, and the differences of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.experiments.run_log import Axis, RunLog
from weft.experiments.statistics import Estimate
from weft.monitor.events import number
from weft.monitor.plots import save_figure, smoothed

_COLOURS = ("#2a6fbb", "#d1495b", "#3a7d44", "#e09f3e", "#7b5ea7", "#4a9ca6", "#8c564b", "#7a7a7a")
_SMOOTH_SHARE = 0.01
_LABELS = {"tokens": "{unit} trained on", "steps": "optimizer step", "time": "seconds in steps", "energy": "joules"}


def plot_runs(logs: Sequence[RunLog], path: Path, axis: Axis = "tokens") -> Path:
    """Draw the training and evaluation loss of several runs over an amount, as a PNG.

    Args:
        logs: the runs; runs without steps are left out.
        path: the PNG file, which is also the return value.
        axis: the quantity of the horizontal axis.

    Raises:
        DataError: if no run has a step, or the file cannot be written.
    """
    logs = [log for log in logs if log.steps]
    if not logs:
        raise DataError("runs: none has a step, so there is nothing to draw. Train for at least one step first.")
    figure, (axes,) = _figure(1, (10, 5.6))
    for at, log in enumerate(logs):
        _draw_run(axes, log, axis, _COLOURS[at % len(_COLOURS)], log.folder.name)
    _label(axes, logs, axis)
    axes.legend(fontsize=10, frameon=False)
    figure.suptitle("Loss of runs", x=0.01, ha="left", fontsize=14, weight="bold")
    axes.set_title("line: training, smoothed · points: evaluation", loc="left", fontsize=10.5, color="#555555")
    return save_figure(figure, path)


def plot_pairs(
    pairs: Sequence[tuple[RunLog, RunLog]],
    differences: Sequence[float],
    estimate: Estimate,
    label: str,
    axis: Axis,
    title: str,
    path: Path,
) -> Path:
    """Draw the curves of all pairs, and to their right the differences with the interval of the mean, as a PNG.

    Args:
        pairs: (run of A, run of B).
        differences, estimate: B - A of each pair, and the mean with its interval.
        label: name and unit of the difference.
        axis: the quantity of the horizontal axis of the curves.
        title, path: headline, and the PNG file, which is also the return value.

    Raises:
        DataError: if the file cannot be written.
    """
    figure, (left, right) = _figure(2, (12, 5.2))
    for number_of_pair, sides in enumerate(pairs):
        for log, colour, name in zip(sides, _COLOURS, ("A", "B"), strict=False):
            _draw_run(left, log, axis, colour, name if number_of_pair == 0 else "")
    _label(left, [log for sides in pairs for log in sides], axis)
    left.legend(fontsize=11, frameon=False)
    left.set_title("line: training, smoothed · points: evaluation", loc="left", fontsize=10.5, color="#555555")
    numbers = range(1, len(differences) + 1)
    if math.isfinite(estimate.half_width):
        low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
        right.axhspan(low, high, color=_COLOURS[1], alpha=0.15, label="95 % interval of the mean")
    right.axhline(estimate.mean, color=_COLOURS[1], linewidth=1.5, label="mean")
    right.axhline(0, color="#555555", linewidth=1)
    right.plot(numbers, differences, "o", color="#333333", markersize=7)
    right.set_xticks(list(numbers))
    right.set_xlabel("pair", fontsize=12)
    right.set_ylabel(label, fontsize=12)
    right.legend(fontsize=10, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
    return save_figure(figure, path)


def _figure(num_columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(1, num_columns, squeeze=False)[0])
    for axes in all_axes:
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=11)
    return figure, all_axes


def _draw_run(axes: Any, log: RunLog, axis: Axis, colour: str, label: str) -> None:
    amounts = log.amounts(axis)
    losses = smoothed([number(event.get("loss")) for event in log.steps], max(1, int(len(amounts) * _SMOOTH_SHARE)))
    axes.plot(amounts, losses, color=colour, linewidth=1.3, alpha=0.8, label=label or None)
    by_step = {event["step"]: amount for event, amount in zip(log.steps, amounts, strict=True)}
    points = [(by_step[one["step"]], number(one.get("loss"))) for one in log.evals if one["step"] in by_step]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4)


def _label(axes: Any, logs: Sequence[RunLog], axis: Axis) -> None:
    axes.set_xlabel(_LABELS[axis].format(unit=logs[0].unit), fontsize=12)
    axes.set_ylabel("loss", fontsize=12)
