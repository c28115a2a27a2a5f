"""How far a run is: what a resumed run must know of its past, besides weights and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Steps done, and the evaluations so far."""

    step: int = 0  # optimizer steps done
    best_loss: float | None = None
    best_step: int | None = None  # of the best evaluation, by the metric `best_by`
    best_value: float | None = None
    best_by: str = "loss"
    evaluations_without_gain: int = 0
    lr_factor: float = 1.0  # on the schedule's rate: below 1 once an alert or a person lowered it

    def __post_init__(self) -> None:
        if self.best_by == "loss" and self.best_value is None:  # of a checkpoint that knew no other metric
            self.best_value = self.best_loss

    def note_best(self, step: int, by: str, value: float | None, *, highest: bool = False) -> bool:
        """Note one evaluation's value, and return True when it is the best so far.

        Args:
            step: after which it was made.
            by: the metric, or "loss".
            value: None, nan and inf are never the best.
            highest: whether the highest value is the best.
        """
        if by != self.best_by:
            self.best_by, self.best_value, self.best_step = by, None, None
        if value is None or not math.isfinite(value):
            return False
        if self.best_value is not None and (value <= self.best_value if highest else value >= self.best_value):
            return False
        self.best_value, self.best_step = value, step
        return True

    def note_evaluation(self, loss: float, min_delta: float) -> bool:
        """Note one evaluation's loss, and return True when it is at least `min_delta` below the best."""
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss - min_delta):
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.evaluations_without_gain = loss, 0
        return True
