"""Plots of a run: the loss curve, drawn from its events, and sheets of samples."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import DataError
from weft.monitor.events import last_per_step, number

_TRAIN, _EVAL, _SKIPPED, _LR = "#2a6fbb", "#d1495b", "#e09f3e", "#7a7a7a"
#: Half-width of the moving average (applied twice), as a share of the run.
_SMOOTH_SHARE = 0.01
#: The axis is logarithmic if the ratio of the highest to the lowest smoothed loss is larger than this.
_LOG_RATIO = 3.0


def unfinished_picture(path: Path, pid: int) -> Path:
    """Return the temporary file of a process that draws `path`."""
    return path.with_name(f".{path.name}.{pid}.tmp")


def plot_loss(events: Iterable[Mapping[str, Any]], path: Path, *, title: str = "") -> Path:
    """Draw the training loss (raw and smoothed), evaluations, skipped steps and the learning rate as a PNG.

    The subtitle shows model, plan, steps and date. The loss axis is logarithmic if the loss spans more than a factor of
    3. The file is replaced atomically.

    Args:
        events: from `read_events`; repeated steps are drawn once.
        path, title: the PNG file, which is also the return value; title "" becomes "Training loss".

    Raises:
        DataError: if there is no step to draw, or the file cannot be written.
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
    return save_figure(figure, Path(path))


def save_figure(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure as a PNG, which is replaced atomically, and return the path.

    Raises:
        DataError: if the file cannot be written.
    """
    temporary = unfinished_picture(path, os.getpid())
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: the plot cannot be written ({error.strerror}).") from error
    return path


def _subtitle(events: list[Mapping[str, Any]], last: Mapping[str, Any]) -> str:
    start = next((event for event in reversed(events) if event.get("event") == "start"), {})
    where = f"on {start.get('world_size', '?')} {start.get('device', '')} ranks"
    plan = f"{start['plan']} {where}" if "plan" in start else ""
    when = last.get("time")
    day = time.strftime("%Y-%m-%d", time.localtime(when)) if isinstance(when, int | float) else ""
    line = " · ".join(str(part) for part in (start.get("model", ""), plan, f"{last['step']:,} steps", day) if part)
    return textwrap.fill(line, 120, break_long_words=False)


def _short(loss: float) -> str:
    return f"{loss:.3f}" if 0.01 <= abs(loss) < 1000 else f"{loss:.3g}"


def smoothed(values: list[float], reach: int) -> list[float]:
    """Compute a centered moving average over `reach` values to each side.

    Near the start, both sides are shorter; near the end, only the right one. Non-finite values are skipped. An average
    without finite values is nan.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    result = []
    for position in range(len(values)):
        # At the start both sides shrink, because the loss falls steeply there. At the end only the right side does: a
        # last value that is not averaged would look like a change of the trend.
        left = min(reach, position)
        right = min(left, len(values) - 1 - position)
        first, end = position - left, position + right + 1
        count = counts[end] - counts[first]
        result.append((sums[end] - sums[first]) / count if count else math.nan)
    return result


def _draw_loss(axis: Any, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

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
        # Put numbers into the legend: next to a point they would cover the curve or be outside the axes.
        label = f"eval, lowest {_short(loss)} at step {step:,}"
        axis.plot(*zip(*points, strict=True), "o-", color=_EVAL, markersize=5, linewidth=1.5, label=label, zorder=5)
        axis.plot([step], [loss], "o", markersize=11, fillstyle="none", color=_EVAL, label="_lowest", zorder=6)
    skipped = [event["step"] for event in steps if event.get("skipped")]
    finite = [value for value in (*smooth, *(loss for _, loss in points)) if math.isfinite(value)]
    if finite and min(finite) > 0 and (ratio := max(finite) / min(finite)) > _LOG_RATIO:
        axis.set_yscale("log")
        subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if math.log10(ratio) < 1.5 else (1, 2, 5)
        axis.yaxis.set_major_locator(LogLocator(subs=subs))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    if skipped:
        # Draw at the lower edge of the axes, because a skipped step often has no loss.
        edge = axis.get_xaxis_transform()
        axis.plot(
            skipped, [0.02] * len(skipped), "^", color=_SKIPPED, markersize=8, transform=edge,
            label=f"skipped ({len(skipped)})", zorder=6,
        )  # fmt: skip
    axis.set_ylabel("loss (nats per token)", fontsize=12)
    axis.legend(loc="upper right", fontsize=11, framealpha=0.9)
    _dress(axis)


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


# A sheet of samples as the model receives them: images, waveforms, mel bands, texts, and the trained parts of the
# text.

#: File formats of a sheet.
SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH_IN, _MEDIA_IN, _LINE_IN, _MARGIN_IN = 10.0, 1.5, 0.19, 0.4
#: Width of a letter, letters per line, and maximum number of lines.
_LETTER_IN, _COLUMNS, _MOST_LINES = 0.0669, 136, 40
#: Space (inches) for the numbers on an axis.
_AXIS_IN = 0.25
#: Number of horizontal points of a waveform.
_WAVE_POINTS = 1200
_LEARNT, _OTHER, _NEVER, _CONTEXT = "#1a7f37", "#b45309", "#c1121f", "#8a8f98"


@dataclass(frozen=True, slots=True)
class GridSample:
    """A sample to draw on a sheet.

    Attributes:
        title: its source.
        picture: (3, height, width), 0 to 255.
        wave, rate: audio samples, and their number per second.
        bands: (bands, frames).
        text: parts of the text with their weights in the loss. Weight 0: context, not trained; below 0: not wanted.
    """

    title: str
    picture: np.ndarray | None = None
    wave: np.ndarray | None = None
    rate: int = 1
    bands: np.ndarray | None = None
    text: Sequence[tuple[str, float]] = ()


def check_grid(path: Path) -> None:
    """Check that a sheet can be drawn to a file.

    Raises:
        DataError: if the suffix is not supported, or the folder is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--sheet={path}: a sheet is drawn into {', '.join(SUFFIXES)}. Give such a file.")
    if not path.parent.is_dir():
        raise DataError(f"--sheet={path}: there is no folder {path.parent}. Make it, or give another file.")


def draw_grid(path: Path, entries: Sequence[GridSample]) -> None:
    """Draw samples one below the other into a file, whose suffix selects the format.

    Raises:
        DataError: if the suffix is not supported, the folder is missing, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_grid(path)
    heights: list[float] = []
    for entry in entries:
        has_media = entry.picture is not None or entry.wave is not None or entry.bands is not None
        text_in = (1 + len(_lines(entry.text))) * _LINE_IN
        heights.append(text_in + has_media * (_MEDIA_IN + _LINE_IN) + _MARGIN_IN)
    total = sum(heights) + _MARGIN_IN
    figure = Figure(figsize=(_WIDTH_IN, total))
    FigureCanvasAgg(figure)
    top = total - _MARGIN_IN / 2
    for entry, height in zip(entries, heights, strict=True):
        _draw(figure, entry, top, total)
        top -= height
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"--sheet={path}: it cannot be written ({why}). Give another file.") from error


def _draw(figure: Any, entry: GridSample, top: float, total: float) -> None:
    title = {"fontsize": 9, "weight": "bold", "parse_math": False}
    figure.text(_MARGIN_IN / _WIDTH_IN, (top - _LINE_IN) / total, _plain(entry.title)[:_COLUMNS], **title)
    top -= 1.6 * _LINE_IN
    at = _MARGIN_IN
    for draw, share in _panels(entry):
        at += _AXIS_IN if share else 0.0
        width = _MEDIA_IN if not share else share * (_WIDTH_IN - at - _MARGIN_IN)
        place = (at / _WIDTH_IN, (top - _MEDIA_IN) / total, width / _WIDTH_IN, _MEDIA_IN / total)
        axes = figure.add_axes(place)
        axes.tick_params(labelsize=7, length=2)
        draw(axes)
        at += width + _MARGIN_IN
    if at > _MARGIN_IN:
        top -= _MEDIA_IN + 1.2 * _LINE_IN
    for line in _lines(entry.text):
        top -= _LINE_IN
        column = 0
        for part, weight in line:
            x = _MARGIN_IN + column * _LETTER_IN
            colour = _CONTEXT if weight == 0 else _NEVER if weight < 0 else _LEARNT if weight == 1 else _OTHER
            kind = {"fontsize": 8, "family": "monospace", "color": colour, "parse_math": False}
            figure.text(x / _WIDTH_IN, top / total, part, **kind)
            column += len(part)


def _panels(entry: GridSample) -> Iterator[tuple[Any, float]]:
    """Yield a function that draws each part of a sample, and its share of the remaining width (0 for a square)."""
    picture, wave, bands = entry.picture, entry.wave, entry.bands
    if picture is not None:

        def show(axes: Any) -> None:
            axes.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
            axes.set_axis_off()

        yield show, 0.0
    if wave is not None:

        def swing(axes: Any) -> None:
            parts = np.array_split(wave, min(_WAVE_POINTS, max(1, len(wave))))
            low = np.array([part.min(initial=0.0) for part in parts])
            high = np.array([part.max(initial=0.0) for part in parts])
            seconds = np.linspace(0, len(wave) / entry.rate, len(low))
            axes.fill_between(seconds, low, high, color="#2f6f9f", linewidth=0.4)
            axes.set_xlim(0, max(seconds[-1], 1 / entry.rate))
            axes.set_xlabel("s", fontsize=7, labelpad=0)

        yield swing, 0.5 if bands is not None else 1.0
    if bands is not None:

        def glow(axes: Any) -> None:
            axes.imshow(bands, origin="lower", aspect="auto", interpolation="nearest", cmap="magma")
            axes.set_xlabel("frames; bands of pitch upwards", fontsize=7, labelpad=0)

        yield glow, 1.0


def _lines(text: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    lines: list[list[tuple[str, float]]] = [[]] if text else []
    left = _COLUMNS
    for stretch, weight in text:
        for index, part in enumerate(_plain(stretch, keep="\n").split("\n")):
            if index:
                lines.append([])
                left = _COLUMNS
            while part:
                if not left:
                    lines.append([])
                    left = _COLUMNS
                lines[-1].append((part[:left], weight))
                part, left = part[left:], left - len(part[:left])
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], [("...", 0.0)]]
    return lines


def _plain(text: str, keep: str = "") -> str:
    return "".join(one if one.isprintable() or one in keep else "·" for one in text)


# Drawing of loss.png during a run, in a separate process with the lowest priority.

#: Seconds after the start before the first chart. Shorter runs are drawn at their end.
FIRST_S = 5.0
#: Minimum seconds between two charts, and the minimum pause relative to the drawing time, which limits the cost to 2
#: % of a core.
BETWEEN_S, REST = 20.0, 50.0
#: Maximum age (s) of a chart during training.
LATE_S = 180.0


class Artist:
    """Draws a run's chart from time to time in another process. Calls do not block, except for `close`.

    Args:
        events, png, title: the log, the chart that is replaced each time, and the text above it.
    """

    def __init__(self, events: Path, png: Path, title: str):
        self._png = png
        self._command = [sys.executable, "-m", "weft.monitor.plots", str(events), str(png), title]
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._free_at = time.monotonic()
        self._free_at += FIRST_S

    def draw_soon(self) -> None:
        """Start drawing because of new events, unless the last chart is recent or a chart is being drawn."""
        now = time.monotonic()
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._process = None
            self._free_at = max(self._free_at, now + min(LATE_S, REST * (now - self._began)))
        if now < self._free_at:
            return
        self._began = now
        self._free_at = now + BETWEEN_S
        # If no process can be started, training continues, and the chart is drawn at the end of the run.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def draw_when_late(self) -> None:
        """Start drawing if the last chart is old. Called at every step."""
        if time.monotonic() - self._began > LATE_S:
            self.draw_soon()

    def close(self) -> None:
        """End the drawing process, if any. May be called more than once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            unfinished_picture(self._png, self._process.pid).unlink(missing_ok=True)
            self._process = None


def main() -> None:
    """Draw one chart. This is the main function of the drawing process."""
    from weft.monitor.events import read_events

    with contextlib.suppress(OSError):
        os.nice(19)
    events, png, title = sys.argv[1:]
    plot_loss(read_events(Path(events)), Path(png), title=title)


if __name__ == "__main__":
    main()
