"""One rank's part of a run: from the run folder to the trained model."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed import Store

from weft import env
from weft.checkpoint import require_space
from weft.comm import Ledger, barrier
from weft.memory import recompute_of
from weft.mesh import Mesh, build_mesh, join_ranks, leave_ranks, pick_device
from weft.monitor import Meter, busy, make_display, tail_events, tell
from weft.optim import build_optimizer, freeze
from weft.parallel import Precision, parallelize
from weft.parallel.context import cut_sequence, sequence_in_use
from weft.parallel.placement.batches import move_batch
from weft.spec.cluster import device_by_torch_name
from weft.spec.config import RunConfig
from weft.spec.layout import Layout
from weft.train.folder import RunFolder
from weft.train.keeping import Keeper
from weft.train.loop import ASKED_TO_STOP, Trainer
from weft.train.progress import Progress
from weft.train.recorder import Recorder
from weft.train.run_lock import run_lock
from weft.train.signals import stop_on_signal
from weft.train.state import expected_bytes
from weft.train.step import TrainStep
from weft.train.summary import already_done, closing_lines, opening_lines
from weft.train.task import Share
from weft.train.task_choice import find_task
from weft.train.time_limit import TimeLimit
from weft.train.time_report import report_times
from weft.train.voice import Voice, watched
from weft.units import parse_seconds


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: optimizer steps done, and "finished" or why it stopped before."""

    step: int
    reason: str


def run_rank(
    run: RunFolder | Path | str,
    place: env.RankEnv | None = None,
    terminal: TextIO | None = None,
    alarm: TextIO | None = None,
    *,
    locked: bool = False,
    started: float | None = None,
    store: Store | None = None,
    command: Sequence[str] = (),
) -> RunResult:
    """Train, as one rank, the run that `prepare_run` made; goes on from the newest valid checkpoint.

    run: what `prepare_run` gave, or the path of its folder. place: this process among the ranks; None is a single rank.
    terminal: where the first rank shows progress. alarm: where another rank tells that it waits, when the first cannot.
    locked: whether the caller holds `run_lock`; else the first rank does while it trains. started: when the command
    began, for train.max_time (s of time.monotonic); by default now. store: where the ranks have met already.
    command: the words that the user typed, for the lines that say what to type next.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    started = time.monotonic() if started is None else started
    holds = locked or (place is not None and place.rank != 0)
    with contextlib.ExitStack() as until_left:
        if not holds:
            until_left.enter_context(run_lock(folder.path))
        config = folder.config()
        device = pick_device(config.launch.device, place.local_rank if place else 0)
        if place is not None:
            join_ranks(place, device, parse_seconds(config.launch.timeout), store)
        ledger = Ledger()
        mesh = build_mesh(folder.plan(), device, ledger.record)
        voice = Voice((terminal if mesh.rank == 0 else alarm) or sys.stdout)
        with watched(folder, config, mesh, voice, owns_process=place is not None):
            with busy(terminal if mesh.rank == 0 else None, "loading the model and the data"):
                rank = _RankRun(folder, config, mesh, ledger, terminal or sys.stdout, voice, command)
            result = rank.train(started, until_left)
            # Who is through waits for the first rank here, where it is watched, and not in the parting.
            barrier(mesh.world)
        # Not after an error: the others may be in a collective and would never come; the launcher ends them.
        leave_ranks()
    return result


class _RankRun:
    """Builds the pieces of one rank's run and joins them."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        mesh: Mesh,
        ledger: Ledger,
        terminal: TextIO,
        voice: Voice,
        command: Sequence[str],
    ):
        self.folder, self.config, self.mesh = folder, config, mesh
        self.terminal, self.voice, self.command = terminal, voice, command
        self.task = find_task(config)
        self.task.open(folder)
        self.share = Share(
            config.train.global_batch,
            mesh.plan.microbatches_per_step,
            mesh.data.rank,
            mesh.data.size,
            pin=mesh.device.type == "cuda",
        )
        self.batches = self.task.batches(self.share)
        self.model = self.task.initial_model(mesh.plan)
        layout = Layout.read(config.layout) if config.layout else None
        freeze(self.model, config.optimizer)
        parallelize(self.model, mesh, layout=layout, seed=config.seed, pinned_limit=config.memory.pinned_limit)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        self.meter = Meter(mesh.device, communication=ledger.seconds_by_axis)
        self.step = TrainStep(
            self.model,
            self.optimizer,
            self.task.loss,
            mesh,
            forward=self.task.forward,
            max_grad_norm=config.optimizer.max_grad_norm,
            nominal_tokens=self.task.nominal_count(),
            meter=self.meter,
        )
        self._choose_recompute()

    def train(self, started: float, until_left: contextlib.ExitStack) -> RunResult:
        """Resume or start, train to the end, sample, sum up. Signals that ask to stop are heeded until the ranks part.

        started: when the command began (s of time.monotonic).
        """
        keeper = Keeper(self.folder, self.config, self.mesh, self.model, self.step, self.batches.state_at)
        with busy(self.terminal if self.mesh.rank == 0 else None, "loading the checkpoint"):
            progress, notes = keeper.resume()
        if progress.step >= self.config.train.steps:
            if self.mesh.rank == 0:
                done = already_done(self.folder, self.task, progress.step, self.command)
                tell(self.terminal, [*notes, *done])
            return RunResult(progress.step, "finished")
        start_step = progress.step
        recorder, limit = None, None
        if self.mesh.rank == 0:
            limit = self._watch_resources(started)
            recorder = self._recorder(progress, notes)
        trainer = Trainer(
            task=self.task,
            mesh=self.mesh,
            model=self.model,
            step=self.step,
            loader=self.batches,
            eval_batches=self._eval_batches(),
            save=lambda progress, is_good: keeper.save(progress, is_good, recorder.on_checkpoint if recorder else None),
            confirm=keeper.confirm,
            halted=keeper.halted,
            meter=self.meter,
            hooks=[hook for hook in (limit, recorder) if hook],
            peak_flops=peak_flops(self.mesh),
            progress=progress,
        )
        until_left.enter_context(stop_on_signal(self.step))
        try:
            reason = trainer.fit()
            times = report_times(self.folder, self.mesh, self.model, trainer.book, self.task, start_step)
            shown = self._show(recorder, progress.step, reason) if recorder else ""
        finally:
            self.voice.display = None
            if recorder:
                recorder.close()
        if self.mesh.rank == 0:
            if limit and reason == ASKED_TO_STOP:
                reason = limit.reason or reason
            tell(self.terminal, closing_lines(self.folder, self.task, progress, reason, shown, times, self.command))
        return RunResult(progress.step, reason)

    def _watch_resources(self, started: float) -> TimeLimit | None:
        """Before the first step: ask for the room of a checkpoint, and watch the time where it has a limit.

        Raises CheckpointError where the disk is too full to save.
        """
        plan, limit = self.mesh.plan, self.config.train.max_time
        num_bytes = expected_bytes(self.task.shapes(), self.config.optimizer, Precision.of(plan).master)
        require_space(self.folder.path, num_bytes)
        return TimeLimit(limit, started + parse_seconds(limit), num_bytes) if limit else None

    def _show(self, recorder: Recorder, step: int, reason: str) -> str:
        """What the trained model makes, while the panel still stands."""
        recorder.on_phase("sampling")
        # Who stops a run wants it to end: making a sample takes seconds.
        if reason == ASKED_TO_STOP or self.step.wants_stop:
            return ""
        with self.mesh.pulse.doing("writes a sample"):
            return self.task.show(self.folder, step)

    def _choose_recompute(self) -> None:
        """Settle before the first step what is recomputed, from the first microbatch of the run."""
        recompute = recompute_of(self.model)
        if recompute is None or recompute.is_chosen:
            return
        batch = cut_sequence(self.model, move_batch(self.batches.batches(0)[0], self.mesh.device))

        def example() -> None:
            with sequence_in_use(self.model):
                self.task.forward(self.model, batch)

        recompute.prepare(self.model, example)

    def _eval_batches(self) -> Callable[[], Iterable[Any]] | None:
        """The evaluation set, made once and read at each evaluation."""
        found = self.task.eval_batches(self.share)
        return None if found is None else lambda: found

    def _recorder(self, progress: Progress, notes: list[str]) -> Recorder:
        config = self.config
        opening = opening_lines(self.folder, self.task, self.mesh, self.model)
        tell(self.terminal, [*opening, *notes])
        epoch = self.batches.samples_per_epoch
        display = make_display(
            self.terminal,
            total_steps=config.train.steps,
            start_step=progress.step,
            every=config.log.every,
            title=(config.run.name, str(self.mesh.plan)),
            steps_per_epoch=epoch / config.train.global_batch if epoch is not None else None,
            past=tail_events(self.folder.events) if progress.step else (),
            metrics={metric.name: metric.label for metric in self.task.metrics},
        )
        self.voice.display = display
        start = {
            "model": self.task.model_line(),
            "plan": str(self.mesh.plan),
            "world_size": self.mesh.world_size,
            "device": str(self.mesh.device.type),
        }
        start = {**start, "weft": env.weft_version(), "torch": torch.__version__}
        return Recorder(self.folder, self.task, display, start)


def peak_flops(mesh: Mesh) -> float | None:
    """Peak FLOP/s of this rank's device at the plan's number format; None where the device is not in the table."""
    if mesh.device.type != "cuda":
        return None
    device = device_by_torch_name(torch.cuda.get_device_name(mesh.device))
    return device.peak_flops(mesh.plan.precision) if device else None
