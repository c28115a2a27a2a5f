"""Which share of a run's time made steps that count, what took the rest, and how often to save."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.monitor.account.time_ledger import PRODUCTIVE, TimeLedger
from weft.monitor.events import number
from weft.units import format_seconds


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of a run, over all its starts.

    wall_s: from the first start to the end, without the time between an orderly stop and the next start. steps_s: of
    steps that count, as `TimeLedger` has them. redone_s: of steps that a later start did again. stalls_s: training
    waited for saves, and for copies in memory. away_s: from the last sign of a start that failed to the next one.
    stall_s, step_s: of one save and one step, medians.
    """

    wall_s: float = 0.0
    steps_s: float = 0.0
    redone_s: float = 0.0
    stalls_s: float = 0.0
    away_s: float = 0.0
    failures: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0

    @property
    def share(self) -> float:
        """Of the time, what made steps that count; 0 to 1."""
        return self.steps_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def between_failures_s(self) -> float:
        """Mean time from one failure to the next; infinite where there was none."""
        return self.wall_s / self.failures if self.failures else math.inf

    def best_every(self) -> int | None:
        """Return the steps between saves that would have cost least; None without a failure or a save."""
        if not self.failures or self.stall_s <= 0 or self.step_s <= 0:
            return None
        return max(1, round(best_interval(self.stall_s, self.between_failures_s) / self.step_s))

    def lines(self, every: int) -> list[str]:
        """Return what to print at the end of a run with failures. every: steps between its saves (checkpoint.every)."""
        if not self.failures:
            return []
        count = f"{self.failures} failure{'s' if self.failures > 1 else ''}"
        lost = {"steps done again": self.redone_s, "starting again": self.away_s, "waiting for saves": self.stalls_s}
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in lost.items() if seconds > 0)
        told = [f"goodput {self.share:.0%} of {format_seconds(self.wall_s)} made steps that count; {count}: {parts}"]
        best = self.best_every()
        if best is not None:
            told.append(
                f"        checkpoint.every={best} would have cost least (now {every}): a save stalls training for "
                f"{format_seconds(self.stall_s)}, and a failure came every {format_seconds(self.between_failures_s)}"
            )
        return told


def best_interval(stall_s: float, between_failures_s: float) -> float:
    """Return the seconds of training between two saves that lose least time to saves and to steps done again.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37; its
    first term is Young's sqrt(2 stall M) of 1974. stall_s: what one save costs. between_failures_s: the mean time.
    """
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = stall_s / (2 * between_failures_s)
    return math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """Add up a run's events.jsonl.

    A start that ends without an "end", or with a failure after it, has failed; the failures that the launcher noted and
    those that only the next start shows (the launcher itself was killed) count alike.
    """
    ledger = TimeLedger()
    kept: dict[int, float] = {}
    all_steps, stalls = [0.0], [0.0]
    wall = away = last = copies = 0.0
    failures, in_order, begun = 0, True, False
    for event in events:
        ledger.feed(event)
        kind, when = event.get("event"), number(event.get("time"))
        if kind == "resume" or not math.isfinite(when):
            continue  # the next start writes "resume" just before its "start"
        if kind == "go_on":
            last = when  # while it was held nobody waited for it
            continue
        if kind == "start":
            if begun and not in_order:
                failures += 1
                away += max(0.0, when - last)
                wall += max(0.0, when - last)
            kept = {step: seconds for step, seconds in kept.items() if step <= int(event["step"])}
            begun, in_order = True, False
        elif begun:
            wall += max(0.0, when - last)
            in_order = kind == "end" or (in_order and kind != "failure")
        if kind == "step":
            seconds = number(event.get("seconds", {}).get("total", 0.0))
            kept[int(event["step"])] = seconds
            all_steps.append(seconds)
        elif kind == "checkpoint":
            stalls.append(number(event.get("stall_s", 0.0)))
        elif kind == "copy":
            copies += number(event.get("stall_s", 0.0))
        last = when
    saves, steps = stalls[1:] or [0.0], all_steps[1:] or [0.0]
    return Goodput(
        wall_s=wall,
        steps_s=ledger.seconds()[PRODUCTIVE],
        redone_s=sum(all_steps) - sum(kept.values()),
        stalls_s=sum(stalls) + copies,
        away_s=away,
        failures=failures,
        stall_s=statistics.median(saves),
        step_s=statistics.median(steps),
    )
