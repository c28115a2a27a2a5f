"""Training of one rank from the run folder, and the context for the event log: config, data, versions, machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from weft import env
from weft.checkpoint.object_store import located
from weft.checkpoint.peer_copies import CopyHome
from weft.checkpoint.save import require_space
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.energy.host_meter import HostMeter
from weft.errors import ActionAsked, ConfigError
from weft.lazy import named_object
from weft.monitor.alerts import RunRequest
from weft.monitor.events import tail_events
from weft.monitor.live import make_display
from weft.monitor.step_times import TimeBook
from weft.monitor.terminal import busy, print_wrapped
from weft.train.batches.batching_by_cost import StepBorders
from weft.train.engine import Engine, EngineJob, ReplicaWorld
from weft.train.folder import RunFolder, run_lock
from weft.train.hooks import Hook, Progress, steps_left_out
from weft.train.loop.callbacks import GOES_BACK, StopReason
from weft.train.loop.cpu_evaluation import CpuEvaluator
from weft.train.loop.energy_hook import EnergyHook, EnergyReports, joules_of_earlier_starts, run_meter
from weft.train.loop.injected_faults import FaultHook, asked_fault
from weft.train.loop.observers import (
    MetricHook,
    NullRecorder,
    PlanWatch,
    RequestWatch,
    RunRecorder,
    TimeLimit,
    roll_back,
)
from weft.train.loop.replicas import ReplicaCoordinator
from weft.train.loop.reporting import Ending, RunLogger, already_done, closing_lines, opening_lines
from weft.train.loop.run_checkpoints import RunCheckpoints
from weft.train.loop.signals import stop_on_signal
from weft.train.loop.trainer import Trainer
from weft.train.shares.balancer import Balancer, LiveShares
from weft.train.shares.book import ShareBook
from weft.train.tasks.base import Task
from weft.train.tasks.registry import find_task
from weft.units import parse_seconds

if TYPE_CHECKING:
    from weft.private_torch import Store

# Context of a run: config, data, versions and machine. The run's first event stores it.

#: Folder with one folder per GPU, which contains a file with the GPU's name.
_GPUS = Path("/proc/driver/nvidia/gpus")


def context(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """Return the run's context as JSON values: "config", "data", versions and machine. Does not import torch."""
    return {
        **_versions(),
        "config": config.model_dump(mode="json", by_alias=True, exclude_none=True),
        "data": _data_digests(folder),
        "machine": _machine(),
    }


def _versions() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {"weft": env.weft_version(), "torch": torch, "python": platform.python_version()}


def _machine() -> dict[str, Any]:
    found = {"host": platform.node(), "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    models = Counter(
        line.partition(":")[2].strip()
        for file in _GPUS.glob("*/information")
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    )
    return {**found, "gpus": ", ".join(f"{count} x {name}" for name, count in sorted(models.items())) or "none"}


def _data_digests(folder: RunFolder) -> dict[str, str]:
    """Return a digest of each data source's tokens, from the run's data.json; empty for tasks without that file."""
    try:
        described = json.loads(folder.text("data.json"))
        return {
            f"{split}.{source['name']}": _digest(source["counts"]["files"])
            for split in ("train", "eval")
            for source in described[split]
        }
    except (ConfigError, ValueError, KeyError, TypeError):  # a custom task may write another data.json, or none
        return {}


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


# One rank's part of a run, from the run folder to the trained model, with any engine.

#: The default engine, as text: engines belong to a higher layer, and importing them imports torch.
TORCH = "weft.train.engines.torch_engine:TorchEngine"
JAX = "weft.train.engines.jax_run:JaxEngine"


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run.

    Attributes:
        step: optimizer steps done.
        reason: "finished", or why the run stopped early.
        parting: the request to pause or to roll back that ended the run, else None.
    """

    step: int
    reason: str
    parting: RunRequest | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Launch options of a run.

    Attributes:
        locked: True if the command holds `run_lock`. Otherwise rank 0 locks the folder while training.
        began: start of the command for train.max_time, in seconds of time.monotonic; None for now.
        alarm: stream on which a rank other than 0 reports that it waits, if rank 0 cannot; None for stdout.
        store: rendezvous store that the ranks have already joined.
        command: the user's command line, to suggest next commands.
        copies: server of in-memory copies on this host, which outlives the ranks.
        engine: the engine class as package.module:Class.
        world: this replica, if each replica is a separate process group.
        store_key: secret that signs the ranks' messages in their store (see `EngineJob`).
    """

    locked: bool = False
    began: float | None = None
    alarm: TextIO | None = None
    store: Store | None = None
    command: tuple[str, ...] = ()
    copies: CopyHome | None = None
    engine: str = TORCH
    world: ReplicaWorld | None = None
    store_key: str = field(default="", repr=False)


def run_rank(
    run: RunFolder | Path | str,
    place: env.RankEnv | None = None,
    terminal: TextIO | None = None,
    start: Start = Start(),
) -> RunResult:
    """Train one rank of a run that `prepare_run` made, from the newest valid checkpoint.

    Args:
        run: the result of `prepare_run`, or the path of its folder.
        place: rank environment of this process; None for a single process.
        terminal: stream on which rank 0 shows progress; None for stdout.
        start: launch options.

    Raises:
        ActionAsked: if the run ended because of a request to pause or to roll back, which the launcher handles. A pause
            raises it only if Weft's launcher started the ranks, or in a single process.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    began = time.monotonic() if start.began is None else start.began
    is_first = place is None or place.rank == 0
    with contextlib.ExitStack() as until_left:
        config = folder.config()
        if is_first and not start.locked:
            until_left.enter_context(run_lock(folder.path, config.run.mode))
        logger = RunLogger((terminal if is_first else start.alarm) or sys.stdout)
        job = EngineJob(
            folder,
            config,
            find_task(config),
            folder.plan(),
            place,
            logger.show,
            start.store,
            logger.record,
            start.world,
            start.store_key,
        )
        job.timeline.change(0, _first_shares(job.plan))
        fault = asked_fault(place.rank if place else 0, job.plan)
        drilled = FaultHook(fault, job.task, folder) if fault else None
        engine = cast(Callable[[EngineJob], Engine], named_object(start.engine))(job)
        try:
            with busy(terminal if is_first else None, "loading the model and the data"):
                engine.build()
            result = _RankRun(job, engine, terminal or sys.stdout, logger, start).train(
                began, until_left, [drilled.watch(engine)] if drilled else []
            )
        except BaseException:
            engine.close(failed=True)
            raise
        engine.close()
    if result.parting is not None and not (result.parting.action == "hold" and place and place.starter != "weft"):
        raise _asked(folder, result.parting, result.step)
    return result


def _asked(folder: RunFolder, wish: RunRequest, step: int) -> ActionAsked:
    why = f" ({wish.by}: {wish.why})" if wish.why else f" ({wish.by})"
    if wish.action == "hold":
        return ActionAsked(f"paused at step {step}{why}. To continue: weft runs resume {folder.path}", "hold", step)
    return ActionAsked(f"step {step}: going back to an older checkpoint{why}.", "roll_back", step)


def _first_shares(plan: Plan) -> tuple[int, ...]:
    """Return the shares of the first step: those of the plan, and equal ones until they are measured."""
    return (1,) * plan.dp_size if plan.measures_shares else plan.shares


#: Reasons to stop after which no sample is written.
_EARLY = (StopReason.REQUESTED, StopReason.ACTION, StopReason.STOP_AT)


class _RankRun:
    """Creates the components of one rank's run, and runs them."""

    def __init__(self, job: EngineJob, engine: Engine, terminal: TextIO, logger: RunLogger, start: Start):
        self.job, self.folder, self.config, self.task, self.engine = job, job.folder, job.config, job.task, engine
        self.terminal, self.logger, self.start = terminal, logger, start

    def train(self, began: float, until_left: contextlib.ExitStack, hooks: Sequence[Hook] = ()) -> RunResult:
        """Load the checkpoint to resume from, train, and print a closing report on rank 0.

        If an earlier start did the last step, nothing is trained. The report has a sample, unless a stop was requested.
        began: start of the command, in time.monotonic. until_left: contexts that close after the ranks disconnect.
        """
        engine, is_first = self.engine, self.engine.rank == 0
        others = ReplicaCoordinator(self.folder, self.config, engine)
        aside = self._cpu_evaluator(until_left)
        checkpoints = RunCheckpoints(self.folder, self.config, engine, self.start.copies, others.elsewhere, aside)
        with busy(self.terminal if is_first else None, "loading the checkpoint"):
            progress, notes = checkpoints.resume()
        if not others.rejoin(checkpoints, progress):
            return RunResult(progress.step, StopReason.REQUESTED.value)
        if progress.step >= self.config.train.last_step and not others.is_unsaved:
            return self._done(progress.step, notes)
        start_step, book = progress.step, TimeBook()
        shares = ShareBook(self.folder.path, engine.plan, self.config.train.global_batch, self.job.timeline)
        notes = [*notes, *shares.open(engine, progress)]
        balancer = Balancer(engine, shares, self.config) if is_first else None
        observers = _observers(self.job, engine, self.terminal, began, book, progress, notes, balancer)
        self.logger.display, self.logger.log = observers.recorder.display, observers.recorder.on_metrics
        trainer = Trainer(
            task=self.task,
            engine=engine,
            checkpoints=checkpoints,
            hooks=[*observers.hooks, *hooks],
            book=book,
            left_out=steps_left_out(self.folder),
            progress=progress,
            requests=observers.requests.take if observers.requests else tuple,
            is_unsaved=others.is_unsaved,
            shares=LiveShares(engine, shares, progress, balancer, observers.recorder),
            aside=aside,
        )
        until_left.enter_context(stop_on_signal(engine))
        try:
            if observers.requests:
                observers.requests.start()
            reason = others.end(checkpoints, trainer, stop := trainer.fit())
            until_left.callback(observers.recorder.draw)
            parting = _parting(self.folder, engine, checkpoints, trainer.parting, progress.step)
            times, shown = engine.reports.times(book, start_step), ""
            observers.recorder.on_phase("sampling")
            # Skip the sample output if a user stopped the run, to avoid a wait of some seconds.
            wanted = stop.reason not in _EARLY and not engine.wants_stop
            if engine.ranks.on_first(lambda: wanted):
                shown = _sample(engine, self.task, self.folder, progress.step)
        except Exception as error:
            checkpoints.leave(error)
            raise
        finally:
            self.logger.display = self.logger.log = None
            observers.close()
        if observers.limit and reason == StopReason.REQUESTED.value:
            reason = observers.limit.reason or reason
        if is_first:
            ending = Ending(progress, reason, shown, times)
            print_wrapped(self.terminal, closing_lines(self.folder, self.task, ending, self.start.command))
        return RunResult(progress.step, reason, parting)

    def _cpu_evaluator(self, until_left: contextlib.ExitStack) -> CpuEvaluator | None:
        """Return the evaluator of checkpoints on the CPU, on rank 0 of a run that uses it."""
        if self.engine.rank or self.config.launch.evaluate_on != "cpu" or not self.engine.evaluates:
            return None
        evaluator = CpuEvaluator(self.folder, self.config, self.engine.plan)
        until_left.callback(evaluator.close)
        return evaluator

    def _done(self, step: int, notes: Sequence[str]) -> RunResult:
        """Report that an earlier start did the last step."""
        if self.engine.replicas is not None:
            self.engine.replicas.end()
        if self.engine.rank == 0:
            lines = already_done(self.folder, self.task, step, self.start.command)
            print_wrapped(self.terminal, [*notes, *lines])
        return RunResult(step, StopReason.FINISHED.value)


def _sample(engine: Engine, task: Task, folder: RunFolder, step: int) -> str:
    """Return the task's sample output on the first rank. All ranks call it."""
    with engine.pulse.doing("writes a sample"):
        return engine.sample(step) or (task.show(folder, step) if engine.rank == 0 else "")


def _parting(
    folder: RunFolder, engine: Engine, checkpoints: RunCheckpoints, request: RunRequest | None, step: int
) -> RunRequest | None:
    """Return the request that the launcher must handle, or None. All ranks call it.

    For a request to roll back, or to skip data, checkpoints in memory are deleted and the run is rolled back. If
    `roll_back` finds no checkpoint to return to, the result is a request to pause.
    """
    if request is None or request.action == "stop":
        return None
    if request.action in GOES_BACK:
        checkpoints.drop_copies()
    if request.action in GOES_BACK and engine.ranks.on_first(lambda: roll_back(folder, request, step)) is None:
        return replace(request, action="hold", why=f"{request.why}; there is no older checkpoint to try".lstrip("; "))
    return request


@dataclass(frozen=True, slots=True)
class _Observers:
    """The hooks of one rank. Ranks other than 0 have a recorder that writes nothing, and no time limit or requests."""

    hooks: Sequence[Hook]
    recorder: NullRecorder
    metrics: MetricHook | None
    limit: TimeLimit | None
    requests: RequestWatch | None
    meter: HostMeter | None

    def close(self) -> None:
        """End the threads, and close the display and the event log."""
        if self.meter:
            self.meter.close()
        if self.requests:
            self.requests.close()
        if self.metrics:
            self.metrics.collector.close()
        self.recorder.close()


def _observers(
    job: EngineJob,
    engine: Engine,
    terminal: TextIO,
    began: float,
    book: TimeBook,
    progress: Progress,
    notes: Sequence[str],
    balancer: Balancer | None,
) -> _Observers:
    settings, limit, requests, recorder = job.config.monitor, None, None, NullRecorder()
    if engine.rank == 0:
        requests = RequestWatch(job.folder.path, time.time() - (time.monotonic() - began), engine)
        limit = _watch_resources(job, engine, began)
        recorder = _recorder(job, engine, terminal, progress, notes)
    metrics = plan_watch = None
    meter, reports, energy = _energy(job, engine, recorder)
    if settings.figures:
        metrics = MetricHook(
            engine, job.place, job.folder.path, parse_seconds(settings.every), recorder, reports, balancer
        )
    if engine.rank == 0:
        with engine.pulse.doing("runs the planner for its estimate"):
            plan_watch = PlanWatch.of(job.task, job.plan, engine.device, book, recorder)
    # Send the planned step time to all ranks, because each rank detects hangs separately.
    engine.pulse.planned_s = engine.ranks.on_first(lambda: plan_watch.step_s if plan_watch else 0.0)
    # The energy hook follows the recorder, so that a reading covers the step, evaluation or end that precedes it.
    hooks = [hook for hook in (limit, metrics, recorder, plan_watch, energy) if hook is not None]
    return _Observers(hooks, recorder, metrics, limit, requests, meter)


def _energy(
    job: EngineJob, engine: Engine, recorder: NullRecorder
) -> tuple[HostMeter | None, EnergyReports | None, EnergyHook | None]:
    """Return the meter and the reports of this machine on one rank of it, and the hook on rank 0."""
    if not job.config.energy.meter:
        return None, None, None
    meter, num_hosts = run_meter(job, engine, engine.reports.measures().gpu)
    if meter is None:
        return None, None, None
    meter.start()
    reports = EnergyReports(meter, recorder.on_metrics if engine.rank == 0 else None)
    if engine.rank != 0:
        return meter, reports, None
    hook = EnergyHook(
        meter,
        reports,
        job.config,
        job.folder.path,
        before_j=joules_of_earlier_starts(job.folder.events),
        num_hosts=num_hosts,
        write=recorder.on_metrics,
        warn=recorder.on_warning,
    )
    return meter, reports, hook


def _watch_resources(job: EngineJob, engine: Engine, began: float) -> TimeLimit | None:
    """Return the run's time limit, or None without one. Raise CheckpointError if the disk has too little space."""
    limit, num_bytes = job.config.train.max_time, engine.reports.checkpoint_bytes()
    require_space(located(job.config.checkpoint.dir or job.folder.path), num_bytes)
    if not limit:
        return None
    # With late results, the host reads each step one step later. This adds up to two steps.
    more = 0 if engine.device == "cpu" else 2
    return TimeLimit(limit, began + parse_seconds(limit), num_bytes, steps_to_stop=2 + more)


def _recorder(
    job: EngineJob, engine: Engine, terminal: TextIO, progress: Progress, notes: Sequence[str]
) -> RunRecorder:
    config, task = job.config, job.task
    print_wrapped(terminal, [*opening_lines(job.folder, task, engine), *notes])
    epoch, borders = engine.batches.samples_per_epoch, StepBorders.of(engine.batches, config.train.global_batch)
    display = make_display(
        terminal,
        total_steps=config.train.steps,
        start_step=progress.step,
        every=config.log.every,
        title=(config.run.name, str(engine.plan)),
        steps_per_epoch=borders.steps(epoch) if epoch is not None else None,
        past=tail_events(job.folder.events) if progress.step else (),
        metrics={metric.name: metric.label for metric in task.metrics},
    )
    start: dict[str, object] = {
        "model": task.model_line(),
        "plan": str(engine.plan),
        "world_size": engine.plan.world_size,
        "device": engine.device.partition(":")[0],
        **context(job.folder, config),
        **engine.reports.versions(),
    }
    return RunRecorder(job.folder, task, display, start)
