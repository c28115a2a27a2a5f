"""What a person sees while a run goes on: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from weft.monitor.record import Metrics, StepRecord
from weft.monitor.screen.step_text import Eta, format_clock, format_loss, numbers
from weft.monitor.screen.terminal import LastingStream, is_live


class Display(Protocol):
    """Shows a run. Every call returns at once; `close` leaves the terminal as it was found, and may be repeated."""

    def step(self, record: StepRecord) -> None:
        """Show a step."""

    def evaluation(self, step: int, loss: float, metrics: Metrics = ()) -> None:
        """Show an evaluation.

        Args:
            step: after which it was made.
            loss: of the evaluation set.
            metrics: of the task, beside the loss: (value, its unit or name).
        """

    def phase(self, name: str) -> None:
        """Show what the run does besides training: "evaluating", "saving", ...; "" when it trains."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """End the display, and leave the terminal as it was found."""

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
    """Make a live panel when `stream` is a terminal (and no CI's), else plain lines.

    Args:
        stream: where it is shown.
        total_steps: of the whole run.
        start_step: steps done before, by the run that this one resumes.
        every: steps from one plain line to the next.
        is_tty: overrules the detection.
        title: what the panel's first line says, such as the run's name and its plan.
        steps_per_epoch: None where an epoch means nothing.
        past: the last events of the run that this one resumes, which the panel's curve goes on from.
        metrics: of the events of evaluations, the label of each metric by its name.
    """
    if is_tty is None:
        is_tty = is_live(stream)
    if is_tty:
        from weft.monitor.screen.live import LiveDisplay

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
