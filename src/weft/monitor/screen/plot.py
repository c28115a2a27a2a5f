"""loss.png: the curve of a run, drawn from its events."""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.monitor.events import last_per_step, number

_TRAIN, _EVAL, _SKIPPED, _LR = "#2a6fbb", "#d1495b", "#e09f3e", "#7a7a7a"
#: The smoothed curve is a mean over this share of the run to each side, taken twice.
_SMOOTH_SHARE = 0.01
#: Beyond this ratio of the highest to the lowest smoothed loss the axis is logarithmic.
_LOG_RATIO = 3.0


def unfinished_picture(path: Path, pid: int) -> Path:
    """Return where a process writes a picture before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{pid}.tmp")


def plot_loss(events: Iterable[Mapping[str, Any]], path: Path, *, title: str = "") -> Path:
    """Draw the training loss (raw and smoothed), evaluations, skipped steps and the learning rate as a PNG.

    Under the title stand model, plan, steps and day. The loss has a logarithmic axis where it spans more than a factor
    of
    3. The file is replaced in one rename.

    Args:
        events: as `read_events` gives them; steps done twice are drawn once.
        path: of the PNG; it is also what is returned.
        title: "" becomes "Training loss".

    Raises:
        DataError: when there is no step to draw, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = list(events)
    steps = last_per_step(events)
    if not steps:
        raise DataError(
            "events: no step has been recorded, so there is nothing to draw. Train for at least one step first."
        )
    figure = Figure(figsize=(10, 6.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    _draw_loss(upper, steps, last_per_step(events, "eval"))
    _draw_lr(lower, steps)
    figure.suptitle(title or "Training loss", x=0.01, ha="left", fontsize=14, weight="bold")
    upper.set_title(_subtitle(events, steps[-1]), loc="left", fontsize=10.5, color="#555555")
    path = Path(path)
    temporary = unfinished_picture(path, os.getpid())
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: the plot cannot be written ({error.strerror}).") from error
    return path


def _subtitle(events: list[Mapping[str, Any]], last: Mapping[str, Any]) -> str:
    """Model, plan, steps and day of what is drawn, as far as the events tell."""
    start = next((event for event in reversed(events) if event.get("event") == "start"), {})
    ranks = (
        f"{start['plan']} on {start.get('world_size', '?')} {start.get('device', '')} ranks" if "plan" in start else ""
    )
    when = last.get("time")
    day = time.strftime("%Y-%m-%d", time.localtime(when)) if isinstance(when, int | float) else ""
    steps = f"{last['step']:,} steps"
    line = " · ".join(str(part) for part in (start.get("model", ""), ranks, steps, day) if part)
    return textwrap.fill(line, 120, break_long_words=False)


def _short(loss: float) -> str:
    return f"{loss:.3f}" if 0.01 <= abs(loss) < 1000 else f"{loss:.3g}"


def smoothed(values: list[float], reach: int) -> list[float]:
    """Mean of each value and its neighbours, `reach` to each side and fewer at the ends, so that it does not lag.

    Values that are not finite are left out; where nothing is left the result is nan.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    result = []
    for position in range(len(values)):
        # At the start the two sides shrink alike, because the loss falls steeply there. At the end only the right one
        # can: a last value that stands for itself would look like a turn of the curve.
        left = min(reach, position)
        right = min(left, len(values) - 1 - position)
        first, end = position - left, position + right + 1
        count = counts[end] - counts[first]
        result.append((sums[end] - sums[first]) / count if count else math.nan)
    return result


def _draw_loss(axis: Any, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    at = [event["step"] for event in steps]
    raw = [value if math.isfinite(value) else math.nan for value in (number(event.get("loss")) for event in steps)]
    reach = max(1, round(_SMOOTH_SHARE * len(raw)))
    smooth = smoothed(smoothed(raw, reach), reach)
    axis.plot(at, raw, color=_TRAIN, alpha=0.3, linewidth=1, label="train, each step", zorder=3)
    if len(at) > 2:
        last = f", last {_short(smooth[-1])}" if math.isfinite(smooth[-1]) else ""
        axis.plot(at, smooth, color=_TRAIN, linewidth=2.2, label=f"train, smoothed{last}", zorder=4)
    points = [(event["step"], number(event.get("loss"))) for event in evaluations]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if points:
        step, loss = min(points, key=lambda point: point[1])
        # Numbers stand in the legend: beside a point they would lie on the curve or outside of the axes.
        label = f"eval, lowest {_short(loss)} at step {step:,}"
        axis.plot(*zip(*points, strict=True), "o-", color=_EVAL, markersize=5, linewidth=1.5, label=label, zorder=5)
        axis.plot([step], [loss], "o", markersize=11, fillstyle="none", color=_EVAL, label="_lowest", zorder=6)
    skipped = [event["step"] for event in steps if event.get("skipped")]
    finite = [value for value in (*smooth, *(loss for _, loss in points)) if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > _LOG_RATIO:
        _log_scale(axis, decades=math.log10(max(finite) / min(finite)))
    if skipped:
        # On the lower edge of the axes, wherever the losses lie: a skipped step often has none.
        edge = axis.get_xaxis_transform()
        axis.plot(
            skipped, [0.02] * len(skipped), "^", color=_SKIPPED, markersize=8, transform=edge,
            label=f"skipped ({len(skipped)})", zorder=6,
        )  # fmt: skip
    axis.set_ylabel("loss (nats per token)", fontsize=12)
    axis.legend(loc="upper right", fontsize=11, framealpha=0.9)
    _dress(axis)


def _log_scale(axis: Any, decades: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 1.5 else (1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _draw_lr(axis: Any, steps: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    rates = [number(event.get("lr")) for event in steps]
    axis.plot([event["step"] for event in steps], rates, color=_LR, linewidth=1.6)
    peak = max((rate for rate in rates if math.isfinite(rate)), default=0.0)
    if peak > 0:
        axis.set_ylim(0, 1.15 * peak)
        axis.set_yticks([0, peak], ["0", f"{peak:.3g}"])
    axis.set_ylabel("learning\nrate", fontsize=11)
    axis.set_xlabel("optimizer step", fontsize=12)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    _dress(axis)


def _dress(axis: Any) -> None:
    axis.tick_params(labelsize=11)
    axis.grid(visible=True, which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)
