"""The numbers of a step, the loss and the remaining time, as people read them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator

from weft.monitor.record import StepRecord
from weft.units import format_bytes, format_count

#: Steps that the remaining time is estimated from; evaluations and saves between them count.
_ETA_WINDOW = 100
#: Units that the lines abbreviate.
_SHORT = {"tokens": "tok"}


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
