"""Callbacks of the training loop: evaluation, saves and requests. They share one `LoopState`."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

from weft.config.run_config import RunConfig
from weft.errors import TrainingHalted
from weft.monitor.alerts import RunRequest
from weft.monitor.guards import NonFiniteGuard
from weft.monitor.step_times import TimeBook
from weft.train.engine import Engine, Evaluation
from weft.train.hooks import Hook, Progress, SaveEnd
from weft.train.loop.cpu_evaluation import CpuEvaluator


class ShareChanges(Protocol):
    """Changes of the ranks' shares between steps."""

    def take(self) -> list[int] | None:
        """Return the shares to use from the next step on, on rank 0; None without a change."""
        ...

    def change(self, shares: Sequence[int]) -> None:
        """Use the shares from the next step on. All ranks call it."""
        ...


#: Requests after which the next start resumes from an older checkpoint.
GOES_BACK = ("roll_back", "skip_data")
#: Seconds of one wait of rank 0 for an evaluation on the CPU.
_WAIT_S = 10.0


class StopReason(enum.Enum):
    """Why the loop ends. The value is the text for users."""

    FINISHED = "finished"
    #: Stop after a signal, or because a hook requested it.
    REQUESTED = "asked to stop"
    #: Stop for a request that the launcher handles after the ranks have ended.
    ACTION = "asked to {action} by {by}"
    #: Stop at `train.stop_at`.
    STOP_AT = "train.stop_at={step}"
    NO_IMPROVEMENT = "no better evaluation loss in {patience} evaluations"
    #: Stop because the other replicas, in separate process groups, have ended.
    OTHERS_ENDED = "the other replicas have ended"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the training loop ended. `str(stop)` is the message for the user."""

    reason: StopReason
    text: str

    @classmethod
    def of(cls, reason: StopReason, **values: object) -> Stop:
        """Return a stop whose text has the reason's values filled in."""
        return cls(reason, reason.value.format(**values))

    def __str__(self) -> str:
        return self.text


class Checkpoints:
    """Interface of a run's checkpoints for the loop. By default, nothing is saved. All ranks call every method."""

    def save(self, progress: Progress, is_good: bool, *, last: bool = False) -> str | None:
        """Begin to write a checkpoint, or return the reason why it is skipped.

        Args:
            is_good: True if an evaluation of these weights gave a finite loss.
        """
        return None

    def copy(self, progress: Progress) -> bool:
        """Begin to copy the state into host memory. Return False if a save is running."""
        return True

    def ended(self, wait: bool = False) -> Sequence[SaveEnd]:
        """Return the outcomes of saves that ended since the last call. With `wait`, wait for the running save too."""
        return ()

    def confirm(self, step: int) -> None:
        """Record that the weights after `step` steps gave a finite loss."""

    def halted(self, first_bad: int) -> str:
        """Describe the checkpoint from which the same command resumes after a stop at `first_bad`."""
        return "it resumes from the last checkpoint"

    def moved(self, before: int, step: int) -> None:
        """Note that training continues from `step` instead of `before`, because of the other replicas."""


@dataclass
class LoopState:
    """State that the loop shares with its callbacks.

    Attributes:
        sound_step: the last step whose evaluation gave a finite loss, or None.
    """

    config: RunConfig
    engine: Engine
    hooks: Hook
    progress: Progress
    book: TimeBook
    guard: NonFiniteGuard = field(init=False)
    sound_step: int | None = None

    def __post_init__(self) -> None:
        self.guard = NonFiniteGuard(self.config.train.max_bad_steps)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        """True after the last step of the run or of this command."""
        return self.step == self.config.train.last_step

    def is_due(self, every: int) -> bool:
        """Return True if something that happens every `every` steps is due now; 0 means never."""
        return bool(every) and self.step % every == 0

    @contextmanager
    def phase(self, name: str, kind: str, doing: str) -> Iterator[None]:
        """Report the current activity to hooks and to waiting ranks, and count its time under `kind`."""
        self.hooks.on_phase(name)
        with self.engine.pulse.doing(doing), self.book.spend(kind):
            yield
        self.hooks.on_phase("")


class Evaluations:
    """Evaluates every `eval.every` steps and after the last one.

    Args:
        aside: on rank 0, evaluates checkpoints while training goes on, if `launch.evaluate_on` is "cpu".
    """

    def __init__(self, loop: LoopState, aside: CpuEvaluator | None = None):
        self._loop, self._aside = loop, aside
        self._is_aside = loop.config.launch.evaluate_on == "cpu"

    @property
    def is_due(self) -> bool:
        """True if the ranks evaluate after this step."""
        loop = self._loop
        return not self._is_aside and loop.engine.evaluates and (loop.is_due(loop.config.eval.every) or loop.is_last)

    def after_step(self) -> Stop | None:
        """Evaluate if due, and update the run's progress. Return a reason to stop early, or None.

        If a hook returns a reason to stop, `engine.wants_stop` is set.
        """
        self._note_ended()
        if not self.is_due:
            return None
        loop, progress = self._loop, self._loop.progress
        with loop.phase("evaluating", "evaluation", "evaluates"):
            evaluation = loop.engine.evaluate()
        rule = loop.config.train.early_stop
        if math.isfinite(evaluation.loss):
            loop.sound_step = progress.step
        self._note(progress.step, evaluation)
        if rule.patience is not None and progress.evaluations_without_gain >= rule.patience:
            return Stop.of(StopReason.NO_IMPROVEMENT, patience=rule.patience)
        return None

    def wait(self) -> None:
        """Wait for the evaluations of checkpoints on the CPU. All ranks call it."""
        loop, aside = self._loop, self._aside
        if not self._is_aside:
            return
        with loop.phase("evaluating", "evaluation", "waits for the evaluation on the CPU"):
            # Rank 0 waits in slices, because the others wait for it in a collective with a time limit.
            while loop.engine.ranks.on_first(lambda: aside is not None and aside.is_busy):
                if aside is not None:
                    aside.wait(_WAIT_S)
                self._note_ended()

    def _note_ended(self) -> None:
        for step, result in self._aside.take() if self._aside is not None else ():
            if isinstance(result, str):
                self._loop.hooks.on_warning(step, f"step {step} is not evaluated: {result}.")
            else:
                self._note(step, result)

    def _note(self, step: int, evaluation: Evaluation) -> None:
        loop, kept = self._loop, self._loop.config.checkpoint
        loop.progress.note_evaluation(evaluation.loss, loop.config.train.early_stop.min_delta)
        value = evaluation.loss if kept.best_by == "loss" else evaluation.metrics.get(kept.best_by)
        loop.progress.note_best(step, kept.best_by, value, highest=kept.best_is == "highest")
        if loop.hooks.on_evaluation(step, evaluation):
            loop.engine.wants_stop = True


class Saves:
    """Saves and copies the state when due, and reports the outcomes of saves to the hooks.

    Args:
        is_unsaved: True if no checkpoint has the initial weights yet.
    """

    def __init__(self, loop: LoopState, checkpoints: Checkpoints, *, is_unsaved: bool = False):
        self._loop, self._checkpoints = loop, checkpoints
        self._saved_step = -1 if is_unsaved else loop.step
        self._copy_waits = False
        #: Set to save after this step.
        self.is_requested = False

    @property
    def is_due(self) -> bool:
        """True if a save follows this step, whatever the result of its evaluation."""
        return self.is_requested or self._loop.is_due(self._loop.config.checkpoint.every)

    def after_step(self) -> None:
        """Begin a save if one is due or this step has the best evaluation; else begin a copy if one is due."""
        loop = self._loop
        is_best = loop.config.checkpoint.keep_best and loop.progress.best_step == loop.step
        if self.is_due or is_best:
            self._copy_waits = self.is_requested = False
            self._begin()
        elif self._copy_waits and not (loop.guard.num_bad or loop.is_last):
            with loop.engine.pulse.doing("copies its state"), loop.book.spend("checkpoint"):
                self._copy_waits = not self._checkpoints.copy(loop.progress)

    def report(self) -> None:
        """Report the saves that have ended to the hooks, and note if a copy is due after this step."""
        self._report(self._checkpoints.ended(False))
        self._copy_waits = self._copy_waits or self._loop.is_due(self._loop.config.checkpoint.peer_every)

    def move(self, before: int, step: int) -> None:
        """Note that training continues from `step` instead of `before`, and call `Checkpoints.moved`.

        `step` counts as not saved.
        """
        self._saved_step = -1
        self._checkpoints.moved(before, step)

    def confirm(self, step: int) -> None:
        """Record that the weights after `step` steps gave a finite loss."""
        self._checkpoints.confirm(step)

    def wait(self) -> str | None:
        """Wait for the running save. Return the reason if the current step's save was refused, else None."""
        with self._loop.phase("saving", "checkpoint", "saves a checkpoint"):
            return self._report(self._checkpoints.ended(True))

    def save_last(self) -> str | None:
        """Save the current step unless it is already saved, and wait. Return the reason for a failure, or None."""
        failed = self.wait()
        if self._saved_step == self._loop.step:
            return failed
        return self._begin(last=True) or self.wait()

    def halt(self, sentence: str) -> TrainingHalted:
        """Return the error for a run that went wrong. Waits for the running save, and does not begin another one.

        Checkpoints that may have damaged weights are renamed, as `RunCheckpoints.halted` describes.
        """
        self.wait()
        first_bad = self._loop.guard.first_bad
        halt = TrainingHalted(f"{sentence}: {self._checkpoints.halted(first_bad or self._loop.step + 1)}.")
        halt.__dict__.update(step=self._loop.step, first_bad=first_bad)
        return halt

    def _begin(self, last: bool = False) -> str | None:
        """Begin to save unless the last step was bad. Return the reason if nothing is saved, else None.

        A finite evaluation loss of the current weights outweighs a bad step. The hooks are warned if nothing is saved.
        """
        loop = self._loop
        is_good = loop.sound_step == loop.step
        if loop.guard.num_bad and not is_good:
            why: str | None = f"no step since {loop.guard.first_bad} had a finite loss and gradient"
        else:
            with loop.phase("saving", "checkpoint", "saves a checkpoint"):
                why = self._checkpoints.save(loop.progress, is_good, last=last)
                self._report(self._checkpoints.ended(False))
        if why is None:
            self._saved_step = loop.step
        else:
            loop.hooks.on_warning(loop.step, f"step {loop.step} is not saved: {why}")
        return why

    def _report(self, ends: Sequence[SaveEnd]) -> str | None:
        """Report outcomes of saves to the hooks. Return the reason if the current step's save was refused."""
        failed = None
        for end in ends:
            if end.path is not None:
                self._loop.hooks.on_checkpoint(end)
            else:
                self._loop.hooks.on_warning(end.step, end.note or f"step {end.step} is not saved: {end.why}")
            if end.why and end.step == self._loop.step:
                failed = end.why
        return failed


class Requests:
    """Acts on the requests of users and alerts, on all ranks after the same step.

    Args:
        pending: returns the pending requests on rank 0; None if the run accepts no requests.
        shares: changes of the ranks' shares, or None.
    """

    def __init__(
        self, loop: LoopState, saves: Saves, pending: Callable[[], Sequence[RunRequest]] | None,
        shares: ShareChanges | None = None,
    ):  # fmt: skip
        self._loop, self._saves, self._pending, self._shares = loop, saves, pending, shares
        #: True if the shares changed, so that batches that were read ahead are not valid. The loop resets it.
        self.has_new_shares = False
        #: The request that ended training, if any.
        self.parting: RunRequest | None = None

    @property
    def goes_back(self) -> bool:
        """True if the next start resumes from an older checkpoint than the last one."""
        return self.parting is not None and self.parting.action in GOES_BACK

    def pause(self, why: str) -> Stop:
        """Pause the run after the current step, on all ranks, and return the reason to stop."""
        self.parting = RunRequest("hold", by="the task", why=why)
        self._loop.hooks.on_action(self._loop.step, self.parting)
        return Stop.of(StopReason.ACTION, action="hold", by=self.parting.by)

    def handle(self) -> Stop | None:
        """Handle pending requests on all ranks. Return a reason to stop, or None.

        Call it if a step's result has `wants_stop`. If the run accepts no requests, it always returns a reason.
        """
        if self._pending is None:
            return Stop.of(StopReason.REQUESTED)
        engine, pending, changes = self._loop.engine, self._pending, self._shares
        engine.asks = False  # reset before reading: later requests are handled after the next step
        votes = engine.ranks.gather(b"stop" if engine.wants_stop else b"")
        wants_stop, requests, shares = engine.ranks.on_first(
            lambda: [b"stop" in votes, [asdict(one) for one in pending()], changes.take() if changes else None]
        )
        if changes is not None and shares is not None:
            changes.change(shares)
            self.has_new_shares = True
        for request in map(RunRequest.from_json, requests):
            self._loop.hooks.on_action(self._loop.step, request)
            if request.action == "checkpoint":
                self._saves.is_requested = True
            elif request.action == "lower_lr":
                self._loop.progress.lr_factor *= request.factor
            elif request.action != "tell" and self.parting is None:
                self.parting = request
        if wants_stop:
            self.parting = None
            return Stop.of(StopReason.REQUESTED)
        if self.parting is None:
            return None
        return Stop.of(StopReason.ACTION, action=self.parting.action, by=self.parting.by)
