"""The training loop: steps, with evaluations and saves when they are due. All output is written by hooks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

from weft.data.order.next_batches import with_next
from weft.errors import StepRefused, TrainingHalted
from weft.monitor.alerts import RunRequest
from weft.monitor.events import StepRecord
from weft.monitor.guards import GarbageTurns, SpikeWatch, mfu
from weft.monitor.step_times import StepTimes, TimeBook, busy_seconds, memory_bytes, own_seconds
from weft.optim.schedule import lr_factor
from weft.train.batches.batching_by_cost import StepBorders
from weft.train.engine import Engine, LateResult, StepResult, TraceKind
from weft.train.hooks import Hook, HookList, Progress, step_ranges
from weft.train.loop.callbacks import (
    Checkpoints,
    Evaluations,
    LoopState,
    Requests,
    Saves,
    ShareChanges,
    Stop,
    StopReason,
)
from weft.train.loop.cpu_evaluation import CpuEvaluator
from weft.train.tasks.base import Task

#: Maximum number of consecutive bad steps to trace, because further ones have the same cause.
_TRACED_IN_A_ROW = 3

#: The microbatches of a step, and those of the next one or None.
_TwoSteps = tuple[list[Any], list[Any] | None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the engine has started."""

    number: int
    lr: float
    result: StepResult | LateResult
    times: StepTimes
    data_s: float


@dataclass
class Trainer:
    """The training loop of one run on one rank.

    If the engine does not wait for its device, the loop reads a step's result after launching the next step, or earlier
    if an evaluation or a save that is due depends on it.

    Attributes:
        left_out: steps, counted from 1, that are skipped with their data.
        requests: returns the pending requests on rank 0; None if the run accepts no requests.
        is_unsaved: True if no checkpoint has the initial weights yet.
        shares: changes of the ranks' shares between steps, or None.
        aside: on rank 0, evaluates checkpoints on the CPU, or None.
    """

    task: Task
    engine: Engine
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    hooks: Sequence[Hook] = ()
    left_out: Collection[int] = ()
    requests: Callable[[], Sequence[RunRequest]] | None = None
    is_unsaved: bool = False
    shares: ShareChanges | None = None
    aside: CpuEvaluator | None = None
    progress: Progress = field(default_factory=Progress)
    book: TimeBook = field(default_factory=TimeBook)

    def __post_init__(self) -> None:
        config = self.task.config
        self._loop = LoopState(
            config,
            self.engine,
            HookList([*self.hooks, *([self.aside] if self.aside else [])]),
            self.progress,
            self.book,
        )
        self._garbage = GarbageTurns(config.train.collect_every)
        self._evaluations = Evaluations(self._loop, self.aside)
        self._saves = Saves(self._loop, self.checkpoints, is_unsaved=self.is_unsaved)
        self._requests = Requests(self._loop, self._saves, self.requests, self.shares)
        self._unread: _Launched | None = None
        self._has_moved = False

    @cached_property
    def _records(self) -> _StepRecords:
        return _StepRecords(self.task, self._loop)

    @property
    def parting(self) -> RunRequest | None:
        """The request that ended training, if any."""
        return self._requests.parting

    def fit(self) -> Stop:
        """Train until the last step or an earlier reason to stop, and return the reason.

        The last step is saved, unless the next start resumes from an older checkpoint.

        Raises:
            TrainingHalted: after too many bad steps, or if the last step could not be saved. A paused run may end with
                an older checkpoint.
        """
        self.book.start()
        self._loop.hooks.on_start(self.progress.step)
        if self.aside is not None:
            self.aside.resume(self.progress)
        self._loop.hooks.on_phase("compiling" if self.engine.plan.compile else "first step")
        with self._garbage:
            stop = self._train() or self._stop_at_end()
        if self._requests.goes_back:
            self._saves.wait()  # do not save these weights
        elif (why := self._saves.save_last()) and not (self.parting and self.parting.action == "hold"):
            # A paused run may keep an older checkpoint for the user to inspect. All other runs must be saved.
            raise self._halt(f"the run ended at step {self.progress.step}, which is not saved: {why}")
        if stop.reason in (StopReason.FINISHED, StopReason.STOP_AT):
            self._evaluations.wait()
        self._end(str(stop))
        return stop

    def _stop_at_end(self) -> Stop:
        train = self.task.config.train
        if train.last_step < train.steps:
            return Stop.of(StopReason.STOP_AT, step=train.last_step)
        return Stop.of(StopReason.FINISHED)

    def _halt(self, sentence: str) -> TrainingHalted:
        halt = self._saves.halt(sentence)
        self._end(str(halt))
        return halt

    def _end(self, reason: str) -> None:
        self.book.stop()
        self._loop.hooks.on_end(self.progress.step, reason)

    def _train(self) -> Stop | None:
        num_steps, stop = self.task.config.train.last_step, None
        while stop is None and self.progress.step < num_steps:
            # A range of steps that are not skipped, unless an outer step changes the step.
            self.progress.step, end = next(step_ranges(self.progress.step, num_steps, self.left_out))
            self._has_moved = self._requests.has_new_shares = False
            with self.engine.batches.iterate(self.progress.step, end) as steps:
                batches = with_next(steps) if self.engine.prefetches else zip(steps, repeat(None))
                while not (stop or self._has_moved) and (found := self._next_batches(batches)) is not None:
                    stop = self._train_step(*found)
            if not (stop or self._has_moved):
                stop = self._read_last()
                self.progress.step = end
        return stop

    def _next_batches(self, steps: Iterator[_TwoSteps]) -> _TwoSteps | None:
        start = time.perf_counter()
        with self.engine.pulse.doing("waits for its data", may_take_long=False):
            try:
                found = next(steps, None)
            except Exception as error:
                # Attributes for the launcher, which may skip this step's data.
                error.__dict__.update(in_data=True, step=self.progress.step + 1)
                raise
        self._records.data_s += time.perf_counter() - start
        return found

    def _train_step(self, batches: list[Any], following: list[Any] | None) -> Stop | None:
        try:
            before, self._unread = self._unread, self._launch(self.progress.step, batches, following)
        except StepRefused as refused:
            return self._read_last() or self._requests.pause(str(refused).rstrip("."))
        launched = self._unread.result
        self.progress.step += 1
        self._garbage.after_step(self.progress.step)

        stop = self._read(before) if before else None
        # True if the next actions may depend on this step's result.
        samples = self._loop.is_due(self.task.config.sample.every) and not self._loop.is_last
        is_due = self._loop.is_last or self._evaluations.is_due or self._saves.is_due or samples
        if stop or is_due or not isinstance(launched, LateResult):
            stop = self._read_last() or stop
        if isinstance(launched, StepResult) and launched.goes_to is not None:
            # An outer step changed the step to continue from. Such engines have no late results.
            done, self.progress.step = self.progress.step, launched.goes_to
            self._has_moved = True
            self._saves.move(done, launched.goes_to)
            self._loop.hooks.on_moved(done, launched.goes_to)
        self._saves.report()
        stop = stop or self._evaluations.after_step()
        if stop is None:
            self._saves.after_step()
        if stop is None and samples:
            with self._loop.phase("sampling", "evaluation", "writes a sample"):
                self.engine.sample(self.progress.step)
        return stop

    def _launch(self, step: int, batches: list[Any], following: list[Any] | None) -> _Launched:
        config, meter = self.task.config, self.engine.meter
        meter.begin_step()
        factor = lr_factor(step, config.train.steps, config.schedule) * self.progress.lr_factor
        result = self.engine.step(batches, step, factor, following)
        data_s, self._records.data_s = self._records.data_s, 0.0
        return _Launched(step + 1, config.optimizer.lr * factor, result, meter.end_step(), data_s)

    def _read_last(self) -> Stop | None:
        unread, self._unread = self._unread, None
        return self._read(unread) if unread else None

    def _read(self, launched: _Launched) -> Stop | None:
        result = launched.result.read() if isinstance(launched.result, LateResult) else launched.result
        record, guard = self._records.make(launched, result), self._loop.guard
        if self._loop.hooks.on_step(record):
            self.engine.wants_stop = True  # the reason may exist only on this rank, and the next step broadcasts it
        if guard.num_bad < _TRACED_IN_A_ROW and (kind := _wrong(result, record.usual_loss)) is not None:
            # All ranks trace, because all of them get the same results.
            with self._loop.phase("tracing", "tracing", "traces a step that went wrong"):
                event = self.engine.trace(kind, launched.number)
            if event is not None:
                self._loop.hooks.on_trace(event)
        try:
            guard.observe(launched.number, result.loss, result.grad_norm, loss_scale=result.loss_scale)
        except TrainingHalted as halt:
            raise self._halt(str(halt)) from None
        if not guard.num_bad:
            self._saves.confirm(launched.number - 1)
        stop = self._requests.handle() if result.wants_stop else None
        self._has_moved = self._has_moved or self._requests.has_new_shares
        return Stop.of(StopReason.OTHERS_ENDED) if result.is_over else stop


class _StepRecords:
    """Makes the records of steps, from their results and the engine's times.

    Attributes:
        data_s: seconds that the loop has waited for the next step's batches.
    """

    def __init__(self, task: Task, loop: LoopState):
        self._task, self._engine, self._book = task, loop.engine, loop.book
        self._peak_flops = loop.engine.reports.peak_flops()
        self._flops = task.flops_per_count() if self._peak_flops else None
        self._spikes = SpikeWatch()
        self.data_s = 0.0

    def make(self, launched: _Launched, result: StepResult) -> StepRecord:
        """Return the record of a step, after waiting for the device. Add its times to the meter and the book."""
        engine, times, unit = self._engine, launched.times, self._task.unit
        engine.meter.count(times, result.count)
        engine.pulse.step_took(times.total_s)
        self._book.add_step(times, launched.data_s)
        first = StepBorders.of(engine.batches, self._task.config.train.global_batch).first
        samples = (first(launched.number) - first(launched.number - 1)) * result.share
        speed, (busy_s, exposed) = engine.meter.count_per_s, busy_seconds(times)
        flops, peak = self._flops, self._peak_flops
        return StepRecord(
            step=launched.number,
            loss=result.loss,
            lr=launched.lr,
            grad_norm=result.grad_norm,
            count=result.count,
            count_per_s=speed,
            seconds={**times.phases, "total": times.total_s},
            memory_bytes=memory_bytes(engine.device)[1],
            mfu=mfu(flops, speed, peak, engine.plan.world_size) if flops and peak else None,
            loss_scale=result.loss_scale,
            update_ratio=result.update_ratio,
            skipped=result.skipped,
            unit=unit,
            samples_per_s=speed * samples / result.count if result.count and unit != "samples" else None,
            busy_s=busy_s,
            exposed=exposed,
            data_s=launched.data_s,
            own=own_seconds(times, launched.data_s),
            usual_loss=self._spikes.observe(result.loss) if self._task.has_loss_level else None,
        )


def _wrong(result: StepResult, usual_loss: float | None) -> TraceKind | None:
    if not math.isfinite(result.loss):
        return "loss" if result.count else None
    if not math.isfinite(result.grad_norm):
        return None if result.loss_scale is not None and result.loss_scale > 1 else "gradient"
    return None if usual_loss is None else "spike"
