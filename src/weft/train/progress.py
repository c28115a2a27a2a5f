"""How far a run is: what a resumed run must know of its past, besides weights and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Steps done, and the evaluations so far."""

    step: int = 0  # optimizer steps done
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0

    def note_evaluation(self, step: int, loss: float, min_delta: float) -> bool:
        """Note one evaluation, and return True when it is the best so far.

        Args:
            step: after which it was made.
            loss: nan and inf are never the best.
            min_delta: how far below the best it must be.
        """
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss - min_delta):
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.best_step, self.evaluations_without_gain = loss, step, 0
        return True
