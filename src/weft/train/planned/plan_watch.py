"""The first rank's observer that lays the plan beside what happens, while it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.monitor import StepRecord
from weft.monitor.times import TimeBook
from weft.planner.measured import measured_parts, parts_of
from weft.spec.plan import Plan
from weft.train.loop import Hook
from weft.train.planned.drift import drifts
from weft.train.planned.expectation import expect
from weft.train.task import Task

#: Steps of a start before the first comparison, and steps and seconds between two.
_FIRST, _EVERY, _EVERY_S = 20, 50, 30.0


class PlanWatch(Hook):
    """Writes what is planned as an event "plan", what is measured as "actual", and what drifted apart as "drift".

    Args:
        expected: of the planner, for one step.
        on_gpu: whether measured memory is what the planner counts; on a CPU it is the whole process.
        book: the rank's times.
        write: takes an event.
        warn: tells a person, given the step and a line.
        now: the clock, in seconds.
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
        """Seconds of a step, as planned."""
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
        """Return the observer of a run; None where nothing is known of its machine.

        Args:
            task: of the run.
            plan: of the run.
            device: of this rank.
            book: the rank's times.
            write: takes an event.
            warn: tells a person.
        """
        expected, _ = expect(task, plan, device)
        return None if expected is None else cls(expected, device.startswith("cuda"), book, write, warn)

    def on_step(self, record: StepRecord) -> str | None:
        """Count, and compare when it is time."""
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
        # The plan counts Python between kernels to the computation.
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
        """Measured over planned: of the step, of its parts that are worth a look, and of memory."""
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
