"""Hooks observe a run. They may ask the loop to stop; they never change a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.checkpoint.targets import Location
from weft.monitor import StepRecord
from weft.monitor.alerts import Wish
from weft.train.engine import Evaluation


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """What became of a save. path: where it is durable. why: why it was not committed. note: what else is to be told.

    is_copy: it is one in memory. stall_s: how long training waited for it. durable_s: from when it was due until it
    was committed.
    """

    step: int
    path: Location | None = None
    why: str = ""
    note: str = ""
    stall_s: float = 0.0
    durable_s: float = 0.0
    is_copy: bool = False


class Hook:
    """Base of all observers: override what you want to see. Called on every rank unless the loop is told otherwise.

    `on_step` and `on_evaluation` may return a reason to stop; the loop then saves and ends at the next step's border
    on all ranks.
    """

    def on_start(self, start_step: int) -> None:
        """Hear that training begins at `start_step` (0, or the step resumed from)."""

    def on_phase(self, name: str) -> None:
        """Hear that the loop turns to something besides training, and when it trains again.

        name: "compiling", "first step", "evaluating", "tracing" or "saving"; "" when it trains again.
        """

    def on_step(self, record: StepRecord) -> str | None:
        """Hear that a step is done. Return a reason to stop, or None."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        """Hear that an evaluation is done. Return a reason to stop, or None."""

    def on_warning(self, step: int, text: str) -> None:
        """Hear what a person should know, in one line: a step that was not saved, a jump of the loss."""

    def on_trace(self, event: Mapping[str, object]) -> None:
        """Hear where a step went wrong: an event of kind "trace"."""

    def on_action(self, step: int, wish: Wish) -> None:
        """Hear that the ranks do what the run was asked for, after `step` steps."""

    def on_moved(self, before: int, step: int) -> None:
        """Hear that training goes on from `step`, not from `before`: replicas that were met are there."""

    def on_checkpoint(self, saved: SaveEnd) -> None:
        """Hear that a checkpoint is complete, on disk or in memory; later steps than its own may be done already."""

    def on_end(self, step: int, reason: str) -> None:
        """Hear that the loop ended after `step` steps. reason: "finished", or why it stopped before."""
