"""The loop: batches in, steps done, evaluated and saved when due. Everything that shows or writes is a hook."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.errors import TrainingHalted
from weft.mesh import Mesh
from weft.monitor import Meter, NonFiniteGuard, StepRecord, memory_bytes, mfu
from weft.monitor.time_book import TimeBook
from weft.optim import lr_factor
from weft.spec.config import RunConfig
from weft.train.evaluate import evaluate
from weft.train.hooks import Hook
from weft.train.microbatches import Microbatches
from weft.train.progress import Progress
from weft.train.step import StepMetrics, TrainStep
from weft.train.task import Batches, Task

#: Why a run ended that a signal or a hook stopped.
ASKED_TO_STOP = "asked to stop"


@dataclass
class Trainer:
    """One run on one rank: what to train, on what, and who watches.

    save: writes a checkpoint of the progress given, or says why it does not; its second argument: an evaluation of
    these weights gave a finite loss. confirm: the weights after so many steps gave a finite loss. halted: where the
    same command resumes after a first bad step, in words. All three are called on every rank. peak_flops: for MFU;
    None where the device's peak is not known. eval_batches is None where there is
    no evaluation data.
    """

    task: Task
    mesh: Mesh
    model: nn.Module
    step: TrainStep
    loader: Batches
    eval_batches: Callable[[], Iterable[Any]] | None
    save: Callable[[Progress, bool], str | None]
    meter: Meter
    confirm: Callable[[int], None] = lambda step: None
    halted: Callable[[int], str] = lambda first_bad: "it resumes from the last checkpoint"
    hooks: Sequence[Hook] = ()
    peak_flops: float | None = None
    progress: Progress = field(default_factory=Progress)
    book: TimeBook = field(default_factory=TimeBook)
    _started: bool = False
    _flops: float | None = None
    _saved_step: int = 0
    _sound_step: int | None = None

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        return self.task.config

    def fit(self) -> str:
        """Train until the last step or a reason to stop; returns "finished" or the reason."""
        num_steps = self.config.train.steps
        guard = NonFiniteGuard(self.config.train.max_bad_steps)
        self._started = False
        self._flops = self.task.flops_per_count() if self.peak_flops else None
        self._saved_step, self._sound_step = self.progress.step, None
        self.book.start()
        for hook in self.hooks:
            hook.on_start(self.progress.step)
            hook.on_phase("compiling" if self.mesh.plan.compile else "first step")
        reason = "finished"
        with self.loader.iterate(self.progress.step, num_steps) as steps:
            for batches in self._awaited(steps):
                if stop := self._advance(batches, guard):
                    reason = stop
                    break
        if self._saved_step != self.progress.step and (why := self._save(guard)):
            # However it came to its end: "asked to stop" promises that everything is saved.
            raise self._halt(f"the run ended at step {self.progress.step}, which is not saved: {why}", guard)
        self._end(reason)
        return reason

    def _advance(self, batches: list[Any], guard: NonFiniteGuard) -> str | None:
        """One step, and what is due after it; a reason to stop, or None."""
        record, metrics = self._train(self.progress.step, batches)
        self.progress.step += 1
        self._show_step(record)
        try:
            guard.observe(record.step, metrics.loss, metrics.grad_norm, loss_scale=metrics.loss_scale)
        except TrainingHalted as halt:
            raise self._halt(str(halt), guard) from None
        if not guard.num_bad:
            self.confirm(record.step - 1)
        stop = ASKED_TO_STOP if metrics.wants_stop else self._evaluate_if_due()
        if not stop and (self._due(self.config.checkpoint.every) or self._is_best_now()):
            self._save(guard)
        return stop

    def _awaited(self, steps: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """The steps' batches; waiting for them is counted."""
        batches = iter(steps)
        while True:
            with self.mesh.pulse.doing("waits for its data", may_take_long=False), self.book.spend("data"):
                found = next(batches, None)
            if found is None:
                return
            yield found

    @contextmanager
    def _phase(self, name: str, kind: str, doing: str) -> Iterator[None]:
        """Tell the hooks, and ranks that wait for this one, what it does; count the time under this kind."""
        for hook in self.hooks:
            hook.on_phase(name)
        with self.mesh.pulse.doing(doing), self.book.spend(kind):
            yield
        for hook in self.hooks:
            hook.on_phase("")

    def _halt(self, sentence: str, guard: NonFiniteGuard) -> TrainingHalted:
        """The end of a run that went wrong: nothing more is saved."""
        text = f"{sentence}: {self.halted(guard.first_bad or self.progress.step + 1)}."
        self._end(text)
        return TrainingHalted(text)

    def _save(self, guard: NonFiniteGuard) -> str | None:
        """Save what is sound; why it is not, or None. Weights of a bad step wait for one that is good again."""
        is_good = self._sound_step == self.progress.step
        if guard.num_bad and not is_good:
            why: str | None = f"no step since {guard.first_bad} had a finite loss and gradient"
        else:
            with self._phase("saving", "checkpoint", "saves a checkpoint"):
                why = self.save(self.progress, is_good)
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

    def _train(self, step: int, batches: list[Any]) -> tuple[StepRecord, StepMetrics]:
        config = self.config
        self.meter.begin_step()
        factor = lr_factor(step, config.train.steps, config.schedule)
        for group in self.step.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        with self._first_is_long():
            metrics = self.step(Microbatches(batches), self._seeds(step), derive_seed(config.seed, step))
        times = self.meter.end_step(metrics.num_tokens)
        self.book.add_step(times)
        speed = self.meter.count_per_s
        record = StepRecord(
            step=step + 1,
            loss=metrics.loss,
            lr=config.optimizer.lr * factor,
            grad_norm=metrics.grad_norm,
            count=metrics.num_tokens,
            count_per_s=speed,
            seconds={**times.phases, "total": times.total_s},
            memory_bytes=memory_bytes(self.mesh.device)[1],
            mfu=mfu(self._flops, speed, self.peak_flops, self.mesh.world_size)
            if self._flops and self.peak_flops
            else None,
            loss_scale=metrics.loss_scale,
            skipped=metrics.skipped,
            unit=self.task.unit,
        )
        return record, metrics

    def _first_is_long(self) -> AbstractContextManager[None]:
        """The first step of a start compiles, which ranks need not finish together."""
        if self._started or not self.mesh.plan.compile:
            return nullcontext()
        self._started = True
        return self.mesh.pulse.doing("compiles the model in its first step")

    def _seeds(self, step: int) -> list[int]:
        """Seeds of torch's generators: functions of (seed, step, first global sample), so nothing is left to save."""
        plan, axis = self.mesh.plan, self.mesh.data
        num_micro = plan.microbatches_per_step
        per_micro = self.config.train.global_batch // (axis.size * num_micro)
        first = step * self.config.train.global_batch + axis.rank * per_micro
        # Ranks of cp have different tokens of the same samples: what drops some of them must not drop alike.
        part = (self.mesh["cp"].rank,) if plan.cp > 1 else ()
        return [
            derive_seed(self.config.seed, step, first + micro * axis.size * per_micro, *part)
            for micro in range(num_micro)
        ]

    def _show_step(self, record: StepRecord) -> None:
        for hook in self.hooks:
            if hook.on_step(record):
                # Only this rank may know the reason: the next step tells the others.
                self.step.wants_stop = True

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _is_best_now(self) -> bool:
        return self.config.checkpoint.keep_best and self.progress.best_step == self.progress.step

    def _evaluate_if_due(self) -> str | None:
        """Evaluate when due or at the end; a reason to stop early, or None."""
        if self.eval_batches is None or not (
            self._due(self.config.eval.every) or self.progress.step == self.config.train.steps
        ):
            return None
        with self._phase("evaluating", "evaluation", "evaluates"):
            evaluation = evaluate(self.model, self.eval_batches(), self.mesh, self.task)
        rule = self.config.train.early_stop
        if math.isfinite(evaluation.loss):
            self._sound_step = self.progress.step
        self.progress.note_evaluation(self.progress.step, evaluation.loss, rule.min_delta)
        for hook in self.hooks:
            if hook.on_evaluation(self.progress.step, evaluation):
                self.step.wants_stop = True
        if rule.patience is not None and self.progress.evaluations_without_gain >= rule.patience:
            return f"no better evaluation loss in {rule.patience} evaluations"
        return None


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from whole numbers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
