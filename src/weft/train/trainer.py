"""The training loop: steps, and evaluations and saves when they are due. Everything that shows or writes is a hook."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weft.config.run_config import RunConfig
from weft.errors import TrainingHalted
from weft.monitor.alerts import RunRequest
from weft.monitor.events import StepRecord
from weft.monitor.guards import GarbageTurns, NonFiniteGuard, SpikeWatch, mfu
from weft.monitor.step_times import StepTimes, TimeBook, busy_seconds, memory_bytes, own_seconds
from weft.optim.schedule import lr_factor
from weft.train.batching_by_cost import StepBorders
from weft.train.engine import Engine, LateResult, StepResult, TraceKind
from weft.train.hooks import Hook, Progress, SaveEnd, stretches
from weft.train.tasks.base import Task

#: Reason for the end of a run that a signal or a hook stopped.
ASKED_TO_STOP = "asked to stop"
#: Reason for the end of a run whose other replicas, in separate worlds, had ended.
OTHERS_ENDED = "the other replicas have ended"
#: Requests after which the next start resumes from an older checkpoint.
GOES_BACK = ("roll_back", "skip_data")
#: Maximum number of consecutive bad steps to trace, because the others have the same cause.
_TRACED_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the engine has started.

    Attributes:
        number: number of the step, from 1.
        data_s: seconds that the loop waited for its batches.
    """

    number: int
    lr: float
    result: StepResult | LateResult
    times: StepTimes
    data_s: float


@dataclass
class Trainer:
    """The training loop of one run on one rank. Callbacks are called on every rank unless noted.

    Attributes:
        task: the task to train.
        engine: the engine that trains it.
        save: begins to write a checkpoint of a progress, and returns None or why it is skipped. Its other arguments: an
            evaluation of these weights gave a finite loss; no step follows.
        copy: like `save`, into the hosts' memory. Returns False if a save is running; it is then called again after the
            next step.
        ended: returns the outcomes of saves. With True, it waits for the running one.
        confirm: records that the weights after a number of steps gave a finite loss.
        halted: describes the checkpoint from which the same command resumes after a first bad step.
        hooks: the observers.
        left_out: steps, counted from 1, that are skipped with their data.
        wishes: returns the pending requests on rank 0; None if the run accepts no requests.
        moved: called with (before, after) when an outer step continues training from another step.
        is_unsaved: no checkpoint has the initial weights.
        parting: the request that ended training, if any.
    """

    task: Task
    engine: Engine
    save: Callable[[Progress, bool, bool], str | None]
    copy: Callable[[Progress], bool] = lambda progress: True
    ended: Callable[[bool], Sequence[SaveEnd]] = lambda wait: ()
    confirm: Callable[[int], None] = lambda step: None
    halted: Callable[[int], str] = lambda first_bad: "it resumes from the last checkpoint"
    hooks: Sequence[Hook] = ()
    left_out: Collection[int] = ()
    wishes: Callable[[], Sequence[RunRequest]] | None = None
    moved: Callable[[int, int], None] = lambda before, step: None
    is_unsaved: bool = False
    progress: Progress = field(default_factory=Progress)
    book: TimeBook = field(default_factory=TimeBook)
    garbage: GarbageTurns = field(init=False)
    parting: RunRequest | None = field(default=None, init=False)
    _spikes: SpikeWatch = field(default_factory=SpikeWatch, init=False)
    _flops: float | None = None
    _peak_flops: float | None = None
    _saved_step: int = 0
    _sound_step: int | None = None
    _data_s: float = 0.0
    _unread: _Launched | None = None
    _copy_waits: bool = False
    _save_asked: bool = False
    _has_moved: bool = False

    def __post_init__(self) -> None:
        self.garbage = GarbageTurns(self.config.train.collect_every)

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        return self.task.config

    def fit(self) -> str:
        """Train until the last step or a reason to stop. Return "finished" or the reason."""
        num_steps = self.config.train.steps
        guard = NonFiniteGuard(self.config.train.max_bad_steps)
        self._peak_flops = self.engine.peak_flops()
        self._flops = self.task.flops_per_count() if self._peak_flops else None
        self._saved_step, self._sound_step = -1 if self.is_unsaved else self.progress.step, None
        self.book.start()
        for hook in self.hooks:
            hook.on_start(self.progress.step)
            hook.on_phase("compiling" if self.engine.plan.compile else "first step")
        with self.garbage:
            reason = self._train_until(num_steps, guard) or "finished"
        if self.parting is not None and self.parting.action in GOES_BACK:
            self._wait_for_saves()  # the next start resumes from an older checkpoint, so do not save these weights
        elif (why := self._save_last(guard)) and self._must_be_saved():
            # A run that ends for any reason, such as "asked to stop", must be saved.
            raise self._halt(f"the run ended at step {self.progress.step}, which is not saved: {why}", guard)
        self._end(reason)
        return reason

    def _train_until(self, num_steps: int, guard: NonFiniteGuard) -> str | None:
        """Train the remaining steps, including jumps after outer steps. Return a reason to stop early, or None."""
        while True:
            self._has_moved, stop = False, None
            for first, end in stretches(self.progress.step, num_steps, self.left_out):
                self.progress.step = first
                if (stop := self._train_up_to(end, guard)) or self._has_moved:
                    break
            if stop or not self._has_moved:
                return stop

    def _train_up_to(self, end: int, guard: NonFiniteGuard) -> str | None:
        """Train all steps up to `end`. Return a reason to stop early, or None."""
        with self.engine.batches.iterate(self.progress.step, end) as steps:
            for batches in self._awaited(steps):
                if (stop := self._advance(batches, guard)) or self._has_moved:
                    return stop
        stop = self._see_last(guard)
        self.progress.step = end
        return stop

    def _advance(self, batches: list[Any], guard: NonFiniteGuard) -> str | None:
        """Take one step and do what is due after it. Return a reason to stop, or None.

        If the engine does not wait for its device, this reads the previous step's result. It reads this step's result
        only if something is due that depends on it.
        """
        before, self._unread = self._unread, self._launch(self.progress.step, batches)
        self.progress.step += 1
        self.garbage.after_step(self.progress.step)
        stop = self._see(before, guard) if before else None
        launched = self._unread.result
        if stop or self._save_asked or not isinstance(launched, LateResult) or self._is_something_due():
            stop = self._see_last(guard) or stop
        self._follow(launched)
        self._report_saves(self.ended(False))
        stop = stop or self._evaluate_if_due()
        self._copy_waits = self._copy_waits or self._due(self.config.checkpoint.peer_every)
        if not stop and (self._due(self.config.checkpoint.every) or self._is_best_now() or self._save_asked):
            self._copy_waits = self._save_asked = False
            self._save(guard)
        elif self._copy_waits and not (stop or guard.num_bad or self._is_last()):
            with self.engine.pulse.doing("copies its state"), self.book.spend("checkpoint"):
                self._copy_waits = not self.copy(self.progress)
        return stop

    def _follow(self, result: StepResult | LateResult) -> None:
        """Continue from the step that an outer step selected, if any. Such engines have no late results."""
        if isinstance(result, StepResult) and result.goes_to is not None:
            before, self.progress.step = self.progress.step, result.goes_to
            self._has_moved, self._saved_step = True, -1
            self.moved(before, result.goes_to)
            for hook in self.hooks:
                hook.on_moved(before, result.goes_to)

    def _see_last(self, guard: NonFiniteGuard) -> str | None:
        """Read the last step's result if it is still unread."""
        unread, self._unread = self._unread, None
        return self._see(unread, guard) if unread else None

    def _see(self, launched: _Launched, guard: NonFiniteGuard) -> str | None:
        """Report and check a step. Return a reason to stop, or None."""
        result = launched.result.read() if isinstance(launched.result, LateResult) else launched.result
        usual = self._spikes.observe(result.loss)
        self._show_step(self._record(launched, result, usual))
        if guard.num_bad < _TRACED_IN_A_ROW and (kind := _wrong(result, usual)) is not None:
            self._trace(kind, launched.number)
        try:
            guard.observe(launched.number, result.loss, result.grad_norm, loss_scale=result.loss_scale)
        except TrainingHalted as halt:
            raise self._halt(str(halt), guard) from None
        if not guard.num_bad:
            self.confirm(launched.number - 1)
        stop = self._heed() if result.wants_stop else None
        return OTHERS_ENDED if result.is_over else stop

    def _trace(self, kind: TraceKind, number: int) -> None:
        """Find the cause of a bad step. All ranks call it, because they check the same numbers."""
        with self._phase("tracing", "tracing", "traces a step that went wrong"):
            event = self.engine.trace(kind, number)
        if event is not None:
            for hook in self.hooks:
                hook.on_trace(event)

    def _heed(self) -> str | None:
        """Handle requests of any rank. Return a reason to stop, or None."""
        if self.wishes is None:
            return ASKED_TO_STOP
        engine, wishes = self.engine, self.wishes
        engine.asks = False  # reset before reading: later requests are handled after the next step
        said = engine.gather(b"stop" if engine.wants_stop else b"")
        found = engine.on_first(lambda: [b"stop" in said, [wish.as_json() for wish in wishes()]])
        for wish in map(RunRequest.from_json, found[1]):
            self._do(wish)
        if found[0]:
            self.parting = None
            return ASKED_TO_STOP
        return None if self.parting is None else f"asked to {self.parting.action} by {self.parting.by}"

    def _do(self, wish: RunRequest) -> None:
        """Handle one request, on all ranks after the same step."""
        for hook in self.hooks:
            hook.on_action(self.progress.step, wish)
        if wish.action == "checkpoint":
            self._save_asked = True
        elif wish.action == "lower_lr":
            self.progress.lr_factor *= wish.factor
        elif wish.action != "tell" and self.parting is None:
            self.parting = wish

    def _must_be_saved(self) -> bool:
        """Return False for a paused run, which may keep an older checkpoint for the user to inspect."""
        return self.parting is None or self.parting.action != "hold"

    def _awaited(self, steps: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Yield the steps' batches and count the waiting time."""
        batches = iter(steps)
        while True:
            start = time.perf_counter()
            with self.engine.pulse.doing("waits for its data", may_take_long=False):
                try:
                    found = next(batches, None)
                except Exception as error:
                    # For the launcher, which may exclude this step's data.
                    error.__dict__.update(in_data=True, step=self.progress.step + 1)
                    raise
            self._data_s += time.perf_counter() - start
            if found is None:
                return
            yield found

    @contextmanager
    def _phase(self, name: str, kind: str, doing: str) -> Iterator[None]:
        """Report an activity to the hooks and to waiting ranks, and count its time under `kind`."""
        for hook in self.hooks:
            hook.on_phase(name)
        with self.engine.pulse.doing(doing), self.book.spend(kind):
            yield
        for hook in self.hooks:
            hook.on_phase("")

    def _halt(self, sentence: str, guard: NonFiniteGuard) -> TrainingHalted:
        """Return the error of a run that went wrong, without saving again."""
        self._wait_for_saves()
        text = f"{sentence}: {self.halted(guard.first_bad or self.progress.step + 1)}."
        self._end(text)
        halt = TrainingHalted(text)
        halt.__dict__.update(step=self.progress.step, first_bad=guard.first_bad)
        return halt

    def _save_last(self, guard: NonFiniteGuard) -> str | None:
        """Save the last step unless it is saved. Return the reason for a failure, or None."""
        failed = self._wait_for_saves()
        if self._saved_step == self.progress.step:
            return failed
        return self._save(guard, last=True) or self._wait_for_saves()

    def _wait_for_saves(self) -> str | None:
        """Wait for the running save. Return why this step's save was not committed, or None."""
        with self._phase("saving", "checkpoint", "saves a checkpoint"):
            return self._report_saves(self.ended(True))

    def _report_saves(self, ends: Sequence[SaveEnd]) -> str | None:
        """Report outcomes of saves to the hooks. Return why this step's save was not committed, or None."""
        failed = None
        for end in ends:
            for hook in self.hooks:
                if end.path is not None:
                    hook.on_checkpoint(end)
                else:
                    hook.on_warning(end.step, end.note or f"step {end.step} is not saved: {end.why}")
            if end.why and end.step == self.progress.step:
                failed = end.why
        return failed

    def _save(self, guard: NonFiniteGuard, last: bool = False) -> str | None:
        """Begin to save unless recent steps were bad. Return why nothing is saved, or None."""
        is_good = self._sound_step == self.progress.step
        if guard.num_bad and not is_good:
            why: str | None = f"no step since {guard.first_bad} had a finite loss and gradient"
        else:
            with self._phase("saving", "checkpoint", "saves a checkpoint"):
                why = self.save(self.progress, is_good, last)
                self._report_saves(self.ended(False))
        if why is None:
            self._saved_step = self.progress.step
        else:
            for hook in self.hooks:
                hook.on_warning(self.progress.step, f"step {self.progress.step} is not saved: {why}")
        return why

    def _end(self, reason: str) -> None:
        self.book.stop()
        for hook in self.hooks:
            hook.on_end(self.progress.step, reason)

    def _launch(self, step: int, batches: list[Any]) -> _Launched:
        meter = self.engine.meter
        meter.begin_step()
        factor = lr_factor(step, self.config.train.steps, self.config.schedule) * self.progress.lr_factor
        result = self.engine.step(batches, step, factor)
        data_s, self._data_s = self._data_s, 0.0
        return _Launched(step + 1, self.config.optimizer.lr * factor, result, meter.end_step(), data_s)

    def _record(self, launched: _Launched, result: StepResult, usual_loss: float | None) -> StepRecord:
        """Return the record of a step, after waiting for the device."""
        meter, times = self.engine.meter, launched.times
        meter.count(times, result.count)
        self.engine.pulse.step_took(times.total_s)
        self.book.add_step(times, launched.data_s)
        first = StepBorders.of(self.engine.batches, self.config.train.global_batch).first
        speed, samples = meter.count_per_s, (first(launched.number) - first(launched.number - 1)) * result.share
        busy_s, exposed = busy_seconds(times)
        return StepRecord(
            step=launched.number,
            loss=result.loss,
            lr=launched.lr,
            grad_norm=result.grad_norm,
            count=result.count,
            count_per_s=speed,
            seconds={**times.phases, "total": times.total_s},
            memory_bytes=memory_bytes(self.engine.device)[1],
            mfu=mfu(self._flops, speed, self._peak_flops, self.engine.plan.world_size)
            if self._flops and self._peak_flops
            else None,
            loss_scale=result.loss_scale,
            update_ratio=result.update_ratio,
            skipped=result.skipped,
            unit=self.task.unit,
            samples_per_s=speed * samples / result.count if result.count and self.task.unit != "samples" else None,
            busy_s=busy_s,
            exposed=exposed,
            data_s=launched.data_s,
            own=own_seconds(times, launched.data_s),
            usual_loss=usual_loss,
        )

    def _show_step(self, record: StepRecord) -> None:
        for hook in self.hooks:
            if hook.on_step(record):
                # The reason may exist only on this rank, and the next step broadcasts it.
                self.engine.wants_stop = True

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _is_last(self) -> bool:
        return self.progress.step == self.config.train.steps

    def _is_something_due(self) -> bool:
        """Return True if something is due that depends on this step's result."""
        evaluates = self.engine.evaluates and self._due(self.config.eval.every)
        return self._is_last() or evaluates or self._due(self.config.checkpoint.every)

    def _is_best_now(self) -> bool:
        return self.config.checkpoint.keep_best and self.progress.best_step == self.progress.step

    def _evaluate_if_due(self) -> str | None:
        """Evaluate when due or at the end. Return a reason to stop early, or None."""
        if not self.engine.evaluates or not (self._due(self.config.eval.every) or self._is_last()):
            return None
        with self._phase("evaluating", "evaluation", "evaluates"):
            evaluation = self.engine.evaluate()
        rule = self.config.train.early_stop
        if math.isfinite(evaluation.loss):
            self._sound_step = self.progress.step
        self.progress.note_evaluation(evaluation.loss, rule.min_delta)
        by, kind = self.config.checkpoint.best_by, self.config.checkpoint.best_is
        value = evaluation.loss if by == "loss" else evaluation.metrics.get(by)
        self.progress.note_best(self.progress.step, by, value, highest=kind == "highest")
        for hook in self.hooks:
            if hook.on_evaluation(self.progress.step, evaluation):
                self.engine.wants_stop = True
        if rule.patience is not None and self.progress.evaluations_without_gain >= rule.patience:
            return f"no better evaluation loss in {rule.patience} evaluations"
        return None


def _wrong(result: StepResult, usual_loss: float | None) -> TraceKind | None:
    """Return the value of a step to trace, or None for a good step or a search for the loss scale."""
    if not math.isfinite(result.loss):
        return "loss" if result.count else None
    if not math.isfinite(result.grad_norm):
        return None if result.loss_scale is not None and result.loss_scale > 1 else "gradient"
    return None if usual_loss is None else "spike"
