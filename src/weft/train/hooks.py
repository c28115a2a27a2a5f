"""Hooks observe a run. They may ask the loop to stop; they never change a step."""

from __future__ import annotations

from pathlib import Path

from weft.monitor import StepRecord
from weft.train.engine import Evaluation


class Hook:
    """Base of all observers: override what you want to see. Called on every rank unless the loop is told otherwise.

    `on_step` and `on_evaluation` may return a reason to stop; the loop then saves and ends at the next step's border
    on all ranks.
    """

    def on_start(self, start_step: int) -> None:
        """Training begins at `start_step` (0, or the step resumed from)."""

    def on_phase(self, name: str) -> None:
        """The loop turns to something besides training: "compiling", "first step", "evaluating" or "saving"; "" when
        it trains again."""

    def on_step(self, record: StepRecord) -> str | None:
        """A step is done. Return a reason to stop, or None."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        """An evaluation is done. Return a reason to stop, or None."""

    def on_warning(self, step: int, text: str) -> None:
        """Something that a person should know, in one line: a step that was not saved, a jump of the loss."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is complete on disk (first rank only)."""

    def on_end(self, step: int, reason: str) -> None:
        """The loop ended after `step` steps. reason: "finished", or why it stopped before."""
