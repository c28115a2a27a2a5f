"""Hooks observe a run. They may request a stop, but never change a training step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.checkpoint.object_store import Location
from weft.errors import ConfigError
from weft.files import replace_text
from weft.monitor.alerts import RunRequest
from weft.monitor.events import StepRecord
from weft.train.engine import Evaluation
from weft.train.folder import RunFolder


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """Outcome of a save.

    Attributes:
        path: location of the durable checkpoint, or None without one.
        why: reason why nothing was saved, or "".
        note: message about the save, or "".
        stall_s: seconds that training waited for the save.
        durable_s: seconds from the start of the save until it was committed.
        is_copy: True for a copy in the memory of the hosts.
    """

    step: int
    path: Location | None = None
    why: str = ""
    note: str = ""
    stall_s: float = 0.0
    durable_s: float = 0.0
    is_copy: bool = False


class Hook:
    """Base class of hooks. Override the methods of interest; they are called on every rank unless documented otherwise.

    `on_step` and `on_evaluation` may return a reason to stop. All ranks then save and stop after the next step.
    """

    def on_start(self, start_step: int) -> None:
        """Note that training begins at `start_step`: 0, or the step to resume from."""

    def on_phase(self, name: str) -> None:
        """Note that the loop begins another activity, or continues training.

        Args:
            name: "compiling", "first step", "evaluating", "sampling", "tracing" or "saving"; "" when training
                continues.
        """

    def on_step(self, record: StepRecord) -> str | None:
        """Note that a step is done. Return a reason to stop, or None."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        """Note that an evaluation is done. Return a reason to stop, or None."""

    def on_warning(self, step: int, text: str) -> None:
        """Note a one-line warning for users, such as a step that was not saved or a loss spike."""

    def on_trace(self, event: Mapping[str, object]) -> None:
        """Record a "trace" event: module, rank and samples at which a step failed."""

    def on_action(self, step: int, wish: RunRequest) -> None:
        """Note that the ranks act on a request of a user or an alert after `step` steps."""

    def on_shares(self, step: int, shares: str) -> None:
        """Note that the data-parallel ranks have other shares of the samples after `step` steps."""

    def on_moved(self, before: int, step: int) -> None:
        """Note that training continues from `step` instead of `before`, because the other replicas are at that step."""

    def on_checkpoint(self, saved: SaveEnd) -> None:
        """Note that a checkpoint is complete, on disk or in memory. Training may already be some steps further."""

    def on_end(self, step: int, reason: str) -> None:
        """Note that the loop ended after `step` steps. `reason` is "finished", or why it stopped early."""


class HookList(Hook):
    """Passes each event on to several hooks in order. The first reason to stop counts."""

    def __init__(self, hooks: Sequence[Hook]):
        self._hooks = tuple(hooks)


def _passing_on(event: str) -> Callable[..., str | None]:
    def pass_on(self: HookList, *args: Any) -> str | None:
        return next(filter(None, [getattr(hook, event)(*args) for hook in self._hooks]), None)

    return pass_on


for _event in [name for name in vars(Hook) if name.startswith("on_")]:
    setattr(HookList, _event, _passing_on(_event))


# Steps whose data a run skips. The data and the learning rate of all other steps do not change.

#: File of the run folder that lists the skipped steps.
LEFT_OUT = "left_out.json"


def steps_left_out(folder: RunFolder) -> frozenset[int]:
    """Return the steps that a run skips, counted from 1: those in left_out.json, or none without this file.

    Raises:
        ConfigError: if left_out.json is damaged.
    """
    if LEFT_OUT not in folder.texts and not (folder.path / LEFT_OUT).is_file():
        return frozenset()
    try:
        return frozenset(map(int, json.loads(folder.text(LEFT_OUT))["steps"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'{folder.path / LEFT_OUT}: not a list of steps such as {{"steps": [7, 8]}}. '
            f"Correct it, or delete it to train on all data."
        ) from error


def leave_out(folder: RunFolder, steps: Collection[int]) -> None:
    """Add steps, counted from 1, to those that the run skips from its next start on."""
    path = folder.path / LEFT_OUT
    known = steps_left_out(RunFolder(folder.path))
    replace_text(path, json.dumps({"steps": sorted({*known, *steps})}) + "\n")


def step_ranges(start: int, end: int, left_out: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield (steps done before, steps done after) for each range of consecutive steps that are not skipped.

    If the last steps are skipped, the last range is empty, so that a run always reaches its end.

    Args:
        start: steps done before the first range.
        end: steps done after the last range.
        left_out: steps to skip, counted from 1.
    """
    first = start
    for step in sorted(one for one in left_out if start < one <= end):
        if step - 1 > first:
            yield first, step - 1
        first = step
    yield first, end


# Progress of a run: the state that a resumed run needs in addition to weights and optimizer.


@dataclass(slots=True)
class Progress:
    """Progress of a run: steps done, and results of the evaluations."""

    step: int = 0  # optimizer steps done
    best_loss: float | None = None
    best_step: int | None = None  # step and value of the best evaluation by `best_by`
    best_value: float | None = None
    best_by: str = "loss"
    evaluations_without_gain: int = 0
    lr_factor: float = 1.0  # factor on the schedule's rate, below 1 after a lower_lr request
    shares: dict[str, Any] | None = None  # shares of the data-parallel ranks by step, if there are several ranks

    def __post_init__(self) -> None:
        if self.best_by == "loss" and self.best_value is None:  # from checkpoints without other metrics
            self.best_value = self.best_loss

    def note_best(self, step: int, by: str, value: float | None, *, highest: bool = False) -> bool:
        """Record the value of an evaluation, and return True if it is the best so far.

        Args:
            step: step of the evaluation.
            by: name of the metric, or "loss". If it is another one than before, the best value so far is discarded.
            value: the value. None, nan and inf are never the best.
            highest: True if higher values are better.
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
        """Record the loss of an evaluation. Return True if it is the first, or more than `min_delta` below the best.

        A loss that is not finite is not recorded, and counts as no improvement.
        """
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss - min_delta):
            self.evaluations_without_gain += 1
            return False
        self.best_loss, self.evaluations_without_gain = loss, 0
        return True
