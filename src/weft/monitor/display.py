"""What a person sees while a run goes on: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

from weft.monitor.record import StepRecord
from weft.monitor.terminal import is_live
from weft.units import format_bytes, format_count

#: Steps that the remaining time is estimated from; evaluations and saves between them count.
_ETA_WINDOW = 100
#: What an evaluation found beside the loss: (value, its unit or name).
Metrics = Sequence[tuple[float, str]]
#: Units that the lines abbreviate.
_SHORT = {"tokens": "tok"}


class Display(Protocol):
    """Shows a run. Every call returns at once; `close` leaves the terminal as it was found, and may be repeated."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        """metrics: of the task, beside the loss: (value, its unit or name)."""

    def phase(self, name: str) -> None:
        """What the run does now besides training: "evaluating", "saving", ...; "" when it trains."""

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...

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
    """A live panel when `stream` is a terminal (and no CI's), else plain lines, one each `every` steps.

    start_step: steps done before, by the run that this one resumes; past: its last events, which the panel's curve
    goes on from. is_tty: overrules the detection. title: what the panel's first line says, such as the run's name and
    its plan. steps_per_epoch: None where an epoch means nothing.
    metrics: of the events of evaluations, the label of each metric by its name.
    """
    if is_tty is None:
        is_tty = is_live(stream)
    if is_tty:
        from weft.monitor.live import LiveDisplay

        return LiveDisplay(
            stream,
            total_steps=total_steps,
            start_step=start_step,
            title=title,
            steps_per_epoch=steps_per_epoch,
            past=past,
            metrics=metrics,
        )
    return PlainDisplay(stream, total_steps=total_steps, start_step=start_step, every=every)


class LastingStream:
    """Passes text on to a stream, and nothing once that is gone: a closed terminal or pipe does not end a run,
    whose numbers are in events.jsonl all the same. Letters that the stream cannot encode become '?'."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class Eta:
    """Seconds that the rest of a run will take, from the wall clock of its last steps.

    The mean of the last steps, with the longest taken for as long as the next: one pause (a stopped process, a laptop
    that slept, the first step's compiling) leaves no trace, and evaluations and saves, which come back, count.
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
        """None before two steps were seen. Time since the last step is taken off, so that a clock runs down."""
        if self._last is None or not self._seconds:
            return None
        step, ended = self._last
        *others, _ = sorted(self._seconds)
        seconds_per_step = (sum(others) + others[-1]) / len(self._seconds) if others else self._seconds[0]
        since = min(time.monotonic() - ended, seconds_per_step)
        return max(0.0, (self._total - step) * seconds_per_step - since)


class PlainDisplay:
    """Whole lines without control characters, for logs and pipes."""

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
            eta = format_clock(self._eta.seconds())
            self._line(
                "  ".join([place, *(f"{name} {value}".strip() for name, value in numbers(record)), f"eta {eta}"])
            )

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        more = "".join(f"  {format_loss(value)} {label}" for value, label in metrics)
        self._line(f"eval {step:>{len(str(self._total))}}/{self._total}  loss {format_loss(loss)}{more}")

    def phase(self, name: str) -> None:
        """Only what may take minutes has a line: the log of a short phase is the line of what it made."""
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


def numbers(record: StepRecord) -> Iterator[tuple[str, str]]:
    """(label, value) pairs of a step, the most wanted first; a value that says what it is has no label."""
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
    """Three decimals, and more for a small loss: 4.312, 0.0412, nan."""
    if not math.isfinite(loss) or loss == 0 or abs(loss) >= 0.1:
        return f"{loss:.3f}"
    return f"{loss:.3g}"


def format_clock(seconds: float | None) -> str:
    """Seconds as a clock shows them: 41 -> '0:41', 4000 -> '1:06:40', 200000 -> '2d 7:33:20', None -> '-:--'."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
