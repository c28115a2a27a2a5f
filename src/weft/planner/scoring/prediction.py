"""What was predicted of one published run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.planner.scoring.rows import PublishedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One run under one tier. memory_gib: by the counter that the run names, else all of the device's memory."""

    run: PublishedRun
    tier: str
    step_s: float
    memory_gib: float
    fits_probability: float
    terms: Mapping[str, float]

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less 1; None where none was measured."""
        return self.step_s / self.run.measured_s - 1 if self.run.measured_s else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, less 1; None where none was measured."""
        return self.memory_gib / self.run.measured_gib - 1 if self.run.measured_gib else None

    @property
    def verdict_is_right(self) -> bool | None:
        """Whether the run failed for memory just where that was to be expected; None where it is not known."""
        if self.run.out_of_memory is None:
            return None
        return (self.fits_probability < 0.5) == self.run.out_of_memory
