"""Display of a run: metrics of steps, loss curve and remaining time, live on a terminal or as plain lines."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from weft import env
from weft.monitor.events import Metrics, StepRecord, last_per_step, number
from weft.monitor.terminal import LastingStream, is_live, sparkline, wrapped
from weft.units import format_bytes, format_count

#: Number of steps, with evaluations and saves between them, that the estimate of the remaining time uses.
_ETA_WINDOW = 100
#: Abbreviations of units.
_SHORT = {"tokens": "tok"}


class Eta:
    """Estimate of the remaining time of a run (s), from the wall clock of its last steps.

    It uses the mean time of the last steps, with the longest time replaced by the second longest. A single pause (a
    stopped process, a sleeping laptop, compilation in the first step) therefore has no effect, but repeated evaluations
    and saves count.
    """

    def __init__(self, total_steps: int):
        self._total = total_steps
        self._last: tuple[int, float] | None = None
        self._seconds: deque[float] = deque(maxlen=_ETA_WINDOW)

    def observe(self, step: int) -> None:
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            self._seconds.append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    def seconds(self) -> float | None:
        """Return the estimate, or None before two steps. It decreases between steps like a clock."""
        if self._last is None or not self._seconds:
            return None
        step, ended = self._last
        *others, _ = sorted(self._seconds)
        seconds_per_step = (sum(others) + others[-1]) / len(self._seconds) if others else self._seconds[0]
        since = min(time.monotonic() - ended, seconds_per_step)
        return max(0.0, (self._total - step) * seconds_per_step - since)


def numbers(record: StepRecord) -> Iterator[tuple[str, str]]:
    """Yield the (label, value) pairs of a step, most important first. A value with a unit has an empty label."""
    yield "loss", format_loss(record.loss)
    yield "lr", f"{record.lr:.1e}"
    yield "grad", f"{record.grad_norm:.2f}" if abs(record.grad_norm) < 1000 else f"{record.grad_norm:.1e}"
    yield "", f"{format_count(record.count_per_s)} {_SHORT.get(record.unit, record.unit)}/s"
    if record.memory_bytes:
        yield "", format_bytes(record.memory_bytes)
    if record.mfu is not None:
        yield "mfu", f"{100 * record.mfu:.1f}%"
    if record.loss_scale is not None:
        yield "scale", f"{record.loss_scale:g}"


def format_loss(loss: float) -> str:
    """Return a loss with three decimals, or three significant digits if it is small: 4.312, 0.0412, nan."""
    if not math.isfinite(loss) or loss == 0 or abs(loss) >= 0.1:
        return f"{loss:.3f}"
    return f"{loss:.3g}"


def format_clock(seconds: float | None) -> str:
    """Return seconds as a clock: 41 -> '0:41', 4000 -> '1:06:40', 200000 -> '2d 7:33:20', None -> '-:--'."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# The live panel of a terminal: progress, metrics, and the loss as a small curve.

_DRAWS_PER_S = 4
#: Phases other than training that are shorter (s) are not shown, because the line would flicker.
_PHASE_SHOWS_S = 0.5
#: Minimum width of the curve in columns. A longer evaluation text is shortened.
_MIN_CURVE = 16
#: Maximum number of points of the curve. When it is reached, adjacent points are averaged.
_MAX_POINTS = 512


class LossCurve:
    """Losses of the full run as a bounded number of points. Each is the mean over the same number of steps."""

    def __init__(self, max_points: int = _MAX_POINTS):
        self._max_points = max_points
        self._points: list[float] = []
        self._stride = 1
        self._sum, self._count = 0.0, 0

    def add(self, loss: float) -> None:
        """Add a loss. Non-finite losses are ignored."""
        if not math.isfinite(loss):
            return
        self._sum += loss
        self._count += 1
        if self._count < self._stride:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) >= self._max_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [(left + right) / 2 for left, right in pairs]
            self._stride *= 2

    def draw(self, width: int) -> str:
        """Return the curve in at most `width` characters, each a mean of steps; '' with fewer than 3 points."""
        return sparkline(self._points, width) if len(self._points) >= 3 and width >= 3 else ""


class LiveDisplay:
    """A panel at the bottom of the terminal. Notes and other output scroll above it.

    The arguments are as in `make_display`.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        start_step: int,
        title: Sequence[str] = (),
        steps_per_epoch: float | None = None,
        past: Sequence[Mapping[str, Any]] = (),
        metrics: Mapping[str, str] | None = None,
    ):
        self._metrics = metrics or {}
        self._total = total_steps
        self._title = title
        self._steps_per_epoch = steps_per_epoch
        self._phase, self._phase_began = "", 0.0
        self._start = start_step
        self._record: StepRecord | None = None
        self._curve = LossCurve()
        self._eta = Eta(total_steps)
        self._began = time.monotonic()
        self._evaluations: tuple[str, ...] = ()
        self._best: tuple[float, int] | None = None
        self._lock = threading.Lock()
        # Draw the run's steps before it was resumed, as far as `past` covers them.
        for event in last_per_step(past):
            if event["step"] <= self._start:
                self._curve.add(number(event.get("loss")))
        for event in last_per_step(past, "eval"):
            if event["step"] <= self._start:
                found = [(event.get(name), label) for name, label in self._metrics.items()]
                metrics_then = [(value, label) for value, label in found if isinstance(value, float)]
                self.evaluation(event["step"], number(event.get("loss")), metrics_then)
        self._console = _TerminalConsole(LastingStream(stream))
        self._live = _SteadyLive(
            _Panel(self),
            console=self._console,
            refresh_per_second=_DRAWS_PER_S,
            vertical_overflow="crop",
            # Show other output to the same terminal above the panel. Output to files is not redirected.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._live.start()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase, self._phase_began = name, time.monotonic()

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._record = record
            self._phase = ""
            self._curve.add(record.loss)
            self._eta.observe(record.step)
        if record.skipped:
            self.note(f"step {record.step}/{self._total}  skipped: {record.skipped}")

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        more = "".join(f" · {format_loss(value)} {label}" for value, label in metrics)
        with self._lock:
            if math.isfinite(loss) and (self._best is None or loss < self._best[0]):
                self._best = (loss, step)
            best = ""
            if self._best is not None and self._best[1] != step:
                best = f" · best {format_loss(self._best[0])} at {self._best[1]}"
            # Texts from the longest to the shortest. The terminal shows the first that fits.
            brief = f"eval {format_loss(loss)}"
            self._evaluations = (f"{brief}{more} at step {step}{best}", f"{brief}{more} at step {step}", brief)

    def note(self, text: str) -> None:
        self._console.print(Text(wrapped(text, max(20, self._console.width - 1))), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self, width: int) -> list[Text | tuple[Text, ProgressBar, Text]]:
        """Return the panel's lines for a terminal of `width` columns; none is wider."""
        with self._lock:
            record = self._record
            evaluation = next((text for text in self._evaluations if len(text) + 3 + _MIN_CURVE <= width), "")
            curve = self._curve.draw(width - (len(evaluation) + 3 if evaluation else 0))
            waits_long = self._phase and time.monotonic() - self._phase_began > _PHASE_SHOWS_S
            last = self._phase if waits_long else f"eta {format_clock(self._eta.seconds())}"
        done = record.step if record else self._start
        share = min(1.0, done / self._total) if self._total else 1.0
        head = Text.assemble((f"step {done}/{self._total} ", "bold"))
        elapsed = format_clock(time.monotonic() - self._began)
        tail = Text.assemble(f" {100 * share:3.0f}%", (f"  {elapsed}", "dim"), f"  {last}")
        room = width - cell_len(head.plain) - cell_len(tail.plain)
        if room < 4:
            tail, room = Text(""), max(0, width - cell_len(head.plain))
        lines: list[Text | tuple[Text, ProgressBar, Text]] = []
        if self._title:
            epoch = f"epoch {1 + done / self._steps_per_epoch:.2f}" if self._steps_per_epoch else ""
            name, *rest = self._title
            lines.append(_fit([(name, "bold"), *((part, "dim") for part in [epoch, *rest])], width, gap=" · "))
        lines.append((head, ProgressBar(total=max(1, self._total), completed=done, width=max(1, room)), tail))
        if record is not None:
            parts = [
                (f"{label} {value}".strip(), "bold" if label == "loss" else "") for label, value in numbers(record)
            ]
            if record.skipped:
                parts.insert(1, ("skipped", "yellow"))
            lines.append(_fit(parts, width))
        if curve or evaluation:
            lines.append(_fit([(curve, "cyan"), (evaluation, "green")], width, gap="   "))
        return lines


class _SteadyLive(Live):
    """A rich Live that erases its old lines completely if a narrowed terminal has wrapped them into more rows.

    Rich moves up as many rows as it drew. Terminals that truncate lines instead of wrapping need no correction.
    """

    def __init__(self, panel: _Panel, **options: Any):
        super().__init__(panel, **options)
        self._panel = panel

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        drawn = self._live_render._shape
        breaks_lines = not env.get("XTERM_VERSION") and env.get("TERM") != "linux"
        if drawn is not None and breaks_lines:
            width = max(1, self.console.width)
            rows = sum(max(1, -(-columns // width)) for columns in self._panel.drawn)
            self._live_render._shape = (drawn[0], max(drawn[1], min(rows, self.console.height)))
        return super().process_renderables(renderables)


class _TerminalConsole(Console):
    """A console that takes the terminal's size from its stream.

    Rich queries the standard streams, which are log files in a rank.
    """

    def __init__(self, stream: LastingStream):
        super().__init__(file=cast(Any, stream), force_terminal=True, highlight=False)

    @property
    def size(self) -> ConsoleDimensions:
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            columns, rows = 0, 0
        return ConsoleDimensions(columns, rows) if columns and rows else super().size


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


class _Panel:
    """Renderable that gets the display's lines each time rich draws, for the terminal's current width."""

    def __init__(self, display: LiveDisplay):
        self._display = display
        #: Width in columns of each line as last drawn.
        self.drawn: list[int] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The last column stays free: some terminals wrap a line that fills it.
        width = max(10, options.max_width - 1)
        lines = self._display.lines(width)
        self.drawn = [width if isinstance(line, tuple) else min(width, cell_len(line.plain)) for line in lines]
        for position, line in enumerate(lines):
            if position:
                yield Segment.line()
            if isinstance(line, tuple):
                head, bar, tail = line
                yield from console.render(_unbroken(head, width), options)
                yield from bar.__rich_console__(console, options)
                yield from console.render(_unbroken(tail, width), options)
            else:
                yield from console.render(_unbroken(line, width), options)


def _unbroken(text: Text, width: int) -> Text:
    text.truncate(width)
    text.end = ""
    text.no_wrap = True
    return text


def _fit(parts: list[tuple[str, str]], width: int, gap: str = "  ") -> Text:
    """Join parts of text. Parts at the end that do not fit are omitted; the first part is truncated."""
    line = Text()
    for text, style in parts:
        if not text:
            continue
        space = gap if line.plain else ""
        if line.plain and cell_len(line.plain) + cell_len(space) + cell_len(text) > width:
            break
        line.append(space)
        line.append(text, style=style)
    line.truncate(width)
    return line


# Display of a training run: a live panel on a terminal, plain lines elsewhere.


class Display(Protocol):
    """Shows a run. Calls do not block. `close` restores the terminal and may be called more than once."""

    def step(self, record: StepRecord) -> None:
        """Show a step."""

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        """Show an evaluation.

        Args:
            step: step after which it ran.
            loss: loss on the evaluation set.
            metrics: metrics of the task in addition to the loss: (value, its unit or name).
        """

    def phase(self, name: str) -> None:
        """Show a phase other than training, such as "evaluating" or "saving". "" means training."""

    def note(self, text: str) -> None:
        """Show a permanent line."""

    def close(self) -> None:
        """End the display and restore the terminal."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...


def make_display(
    stream: TextIO,
    *,
    total_steps: int,
    start_step: int = 0,
    every: int = 10,
    is_tty: bool | None = None,
    title: Sequence[str] = (),
    steps_per_epoch: float | None = None,
    past: Sequence[Mapping[str, Any]] = (),
    metrics: Mapping[str, str] | None = None,
) -> Display:
    """Make a display: a live panel if `stream` is a terminal outside CI, else plain lines.

    Args:
        stream: output stream.
        total_steps: steps of the full run.
        start_step: steps done before, if this run was resumed.
        every: steps between two plain lines.
        is_tty: whether to use the live panel; None to detect it.
        title: parts of the panel's first line, such as the run's name and its plan.
        steps_per_epoch: None if epochs do not apply.
        past: the last events before the run was resumed, with which the panel's curve begins.
        metrics: label of each metric in evaluation events, by name.
    """
    if is_live(stream) if is_tty is None else is_tty:
        return LiveDisplay(
            stream, total_steps=total_steps, start_step=start_step, title=title, steps_per_epoch=steps_per_epoch,
            past=past, metrics=metrics,
        )  # fmt: skip
    return PlainDisplay(stream, total_steps=total_steps, start_step=start_step, every=every)


class PlainDisplay:
    """Display that prints complete lines without control characters, for logs and pipes."""

    def __init__(self, stream: TextIO, *, total_steps: int, start_step: int, every: int):
        self._stream = LastingStream(stream)
        self._total = total_steps
        self._first = start_step + 1
        self._every = max(1, every)
        self._eta = Eta(total_steps)

    def step(self, record: StepRecord) -> None:
        self._eta.observe(record.step)
        place = f"step {record.step:>{len(str(self._total))}}/{self._total}"
        if record.skipped:
            self._line(f"{place}  skipped: {record.skipped}")
        elif record.step % self._every == 0 or record.step in (self._first, self._total):
            parts = (f"{name} {value}".strip() for name, value in numbers(record))
            self._line("  ".join([place, *parts, f"eta {format_clock(self._eta.seconds())}"]))

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        more = "".join(f"  {format_loss(value)} {label}" for value, label in metrics)
        self._line(f"eval {step:>{len(str(self._total))}}/{self._total}  loss {format_loss(loss)}{more}")

    def phase(self, name: str) -> None:
        """Print a line if the phase may take minutes. For other phases, the line with their result suffices."""
        if name == "compiling":
            self._line("compiling the model: the first step takes longer")

    def note(self, text: str) -> None:
        for line in text.splitlines() or [""]:
            self._line(line)

    def close(self) -> None:
        pass

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        self._stream.write("".join(letter if letter.isprintable() else " " for letter in text) + "\n")
        self._stream.flush()
