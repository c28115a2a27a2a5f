"""One rank's run: its time limit, its recorded context, and training from the run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from weft import env
from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.peer_copies import CopyHome
from weft.checkpoint.save import require_space
from weft.config.run_config import RunConfig
from weft.errors import ActionAsked, ConfigError
from weft.lazy import named_object
from weft.monitor.alerts import RunRequest
from weft.monitor.events import StepRecord, tail_events
from weft.monitor.live import make_display
from weft.monitor.step_times import TimeBook
from weft.monitor.terminal import busy, tell
from weft.train.batching_by_cost import StepBorders
from weft.train.checkpointer import Keeper
from weft.train.engine import Engine, EngineJob, Evaluation, ReplicaWorld
from weft.train.folder import RunFolder, run_lock
from weft.train.hooks import Hook, Progress, SaveEnd, steps_left_out
from weft.train.injected_faults import FaultHook, asked_fault
from weft.train.observers import FigureHook, PlanWatch, RequestWatch, RunRecorder, roll_back
from weft.train.reporting import Ending, RunLogger, already_done, closing_lines, opening_lines
from weft.train.signals import stop_on_signal
from weft.train.tasks.registry import find_task
from weft.train.trainer import ASKED_TO_STOP, GOES_BACK, Trainer
from weft.units import parse_seconds

if TYPE_CHECKING:
    from weft.private_torch import Store

#: Number of recent steps whose maximum predicts later ones, so that one slow step does not count forever.
_RECENT = 50
#: Write speed in bytes per second that is assumed before the first checkpoint.
_ASSUMED_SPEED = 100e6
#: Seconds from the last save to the end of the process: plots, the report, leaving the group.
_CLOSING_S = 10.0


class TimeLimit(Hook):
    """Requests a stop before the time limit. One rank watches, and the loop stops all ranks after the same step.

    Args:
        text: the limit as the user typed it.
        deadline: time on the clock in seconds.
        checkpoint_bytes: size of a checkpoint.
        steps_to_stop: maximum number of steps after the request.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        text: str,
        deadline: float,
        checkpoint_bytes: int,
        *,
        steps_to_stop: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._text, self._deadline, self._clock = text, deadline, clock
        self._steps_to_stop = steps_to_stop
        self._save_s = checkpoint_bytes / _ASSUMED_SPEED
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0
        self._last = 0.0
        self._evaluated_s = 0.0
        self.reason = ""

    def on_start(self, start_step: int) -> None:
        self._last = self._clock()
        late = self._last - self._deadline
        if late >= 0:
            raise ConfigError(
                f"train.max_time={self._text}: the time ran out {late:.0f} s before the first step. "
                f"Use a longer time, or leave it out."
            )

    def on_step(self, record: StepRecord) -> str | None:
        now = self._clock()
        self._steps.append(record.seconds["total"])
        # Time between two steps, except evaluation: waiting for data, and a save if one was due.
        self._save_s = max(self._save_s, now - self._last - record.seconds["total"] - self._evaluated_s)
        self._last, self._evaluated_s = now, 0.0
        # The first step of a start includes setup, so it does not predict later ones.
        longest = max(list(self._steps)[1:] or self._steps)
        # The other ranks receive the request in the next step, and an evaluation may come before it.
        if now + self._steps_to_stop * longest + self._evaluation_s + self._save_s + _CLOSING_S < self._deadline:
            return None
        self.reason = f"train.max_time={self._text} is nearly used up"
        return self.reason

    def on_checkpoint(self, saved: SaveEnd) -> None:
        self._save_s = max(self._save_s, saved.durable_s)  # training waits for the last one

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        self._evaluated_s = self._clock() - self._last
        self._evaluation_s = max(self._evaluation_s, self._evaluated_s)


# The context of a run: config, data, versions and machine. Its first event stores them.

#: One folder per GPU, with a file that names it.
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
    """Return name, system, cores and GPUs of this machine."""
    found = {"host": platform.node(), "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    models = Counter(
        line.partition(":")[2].strip()
        for file in _GPUS.glob("*/information")
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    )
    return {**found, "gpus": ", ".join(f"{count} x {name}" for name, count in sorted(models.items())) or "none"}


def _data_digests(folder: RunFolder) -> dict[str, str]:
    """Return a digest of each source's tokens from the run's data.json; empty for tasks without that file."""
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

#: The default engine. Named as text, because engines belong to a higher layer and import torch.
TORCH = "weft.train.torch_engine:TorchEngine"


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run: optimizer steps done, "finished" or the reason for stopping, and the request that ended it."""

    step: int
    reason: str
    parting: RunRequest | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Launch options of a run.

    Attributes:
        locked: the command holds `run_lock`. Otherwise rank 0 holds it while training.
        began: start of the command for train.max_time, in seconds of time.monotonic; None for now.
        alarm: stream on which a rank other than 0 reports that it waits, if rank 0 cannot.
        store: store at which the ranks have already met.
        command: the command line of the user, for the lines with next commands.
        copies: storage for copies of the state on this host that outlives its ranks.
        engine: the engine class as package.module:Class.
        world: replica of these ranks, if each replica is a separate world.
        store_key: secret of the ranks' messages in their store (see `EngineJob`).
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
        place: rank of this process; None for a single rank.
        terminal: stream on which rank 0 shows progress; None for stdout.
        start: launch options.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(Path(run))
    began = time.monotonic() if start.began is None else start.began
    is_first = place is None or place.rank == 0
    with contextlib.ExitStack() as until_left:
        config = folder.config()
        if is_first and not start.locked:
            until_left.enter_context(run_lock(folder.path, config.run.mode))
        voice = RunLogger((terminal if is_first else start.alarm) or sys.stdout)
        job = EngineJob(
            folder,
            config,
            find_task(config),
            folder.plan(),
            place,
            voice.tell,
            start.store,
            voice.record,
            start.world,
            start.store_key,
        )
        fault = asked_fault(place.rank if place else 0, job.plan)
        drilled = FaultHook(fault, job.task, folder) if fault else None
        engine = cast(Callable[[EngineJob], Engine], named_object(start.engine))(job)
        try:
            with busy(terminal if is_first else None, "loading the model and the data"):
                engine.build()
            result = _RankRun(job, engine, terminal or sys.stdout, voice, start).train(
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
    """Return the exception that ends this process after training ended in order, for the launcher to handle."""
    why = f" ({wish.by}: {wish.why})" if wish.why else f" ({wish.by})"
    if wish.action == "hold":
        return ActionAsked(f"held at step {step}{why}. To go on: weft resume {folder.path}", "hold", step)
    return ActionAsked(f"step {step}: going back to an older checkpoint{why}.", "roll_back", step)


class _RankRun:
    """Connects the components of one rank's run."""

    def __init__(self, job: EngineJob, engine: Engine, terminal: TextIO, voice: RunLogger, start: Start):
        self.folder, self.config, self.task, self.engine = job.folder, job.config, job.task, engine
        self.terminal, self.voice, self.command, self.home = terminal, voice, start.command, start.copies
        self.place, self.is_one_of_several = job.place, job.world is not None

    def train(self, began: float, until_left: contextlib.ExitStack, hooks: Sequence[Hook] = ()) -> RunResult:
        """Resume or start, train to the end, show a sample and report. Handles stop signals until the ranks disconnect.

        Args:
            began: start of the command, in seconds of time.monotonic.
            until_left: stack of contexts that close after the ranks disconnect.
            hooks: additional hooks.
        """
        is_first = self.engine.rank == 0
        others = ReplicaCoordinator(self.folder, self.config, self.engine, is_alone=not self.is_one_of_several)
        keeper = Keeper(self.folder, self.config, self.engine, self.home, others.elsewhere)
        with busy(self.terminal if is_first else None, "loading the checkpoint"):
            progress, notes = keeper.resume()
        if not others.rejoin(keeper, progress):
            return RunResult(progress.step, ASKED_TO_STOP)
        if progress.step >= self.config.train.steps and not others.is_unsaved:
            return self._done_before(progress, notes)
        start_step, recorder, limit, watch = progress.step, None, None, None
        if is_first:
            watch = RequestWatch(self.folder.path, time.time() - (time.monotonic() - began), self.engine)
            limit, recorder = self._watch_resources(began), self._recorder(progress, notes)
        figures, book = self._figures(recorder), TimeBook()
        trainer = Trainer(
            task=self.task,
            engine=self.engine,
            save=lambda progress, is_good, last: keeper.save(progress, is_good, last=last),
            copy=keeper.copy,
            ended=keeper.ended,
            confirm=keeper.confirm,
            halted=keeper.halted,
            hooks=[hook for hook in (limit, figures, recorder, self._plan_watch(recorder, book), *hooks) if hook],
            book=book,
            left_out=steps_left_out(self.folder),
            progress=progress,
            wishes=watch.take if watch else tuple,
            moved=keeper.moved,
            is_unsaved=others.is_unsaved,
        )
        until_left.enter_context(stop_on_signal(self.engine))
        try:
            if watch:
                watch.start()
            reason = others.end(keeper, trainer, trainer.fit())
            if recorder:
                until_left.callback(recorder.draw)
            parting = self._parting(keeper, trainer)
            times = self.engine.report(trainer.book, start_step)
            shown = self._show(recorder, progress.step, reason) if recorder else ""
        except Exception as error:
            keeper.leave(error)
            raise
        finally:
            self.voice.display = self.voice.log = None
            for one in filter(None, (watch, figures.collector if figures else None, recorder)):
                one.close()
        if limit and reason == ASKED_TO_STOP:
            reason = limit.reason or reason
        if is_first:
            self._close(Ending(progress, reason, shown, times))
        return RunResult(progress.step, reason, parting)

    def _done_before(self, progress: Progress, notes: Sequence[str]) -> RunResult:
        """Return the result of a run whose last step an earlier command has done."""
        self.engine.end()
        if self.engine.rank == 0:
            tell(self.terminal, [*notes, *already_done(self.folder, self.task, progress.step, self.command)])
        return RunResult(progress.step, "finished")

    def _close(self, ending: Ending) -> None:
        tell(self.terminal, closing_lines(self.folder, self.task, ending, self.command))

    def _figures(self, recorder: RunRecorder | None) -> FigureHook | None:
        """Return this rank's monitoring hook, or None if the config disables it."""
        settings = self.config.monitor
        if not settings.figures:
            return None
        publish = recorder.on_figures if recorder else None
        on_slow = recorder.on_slow if recorder else None
        return FigureHook(self.engine, self.place, self.folder.path, parse_seconds(settings.every), publish, on_slow)

    def _plan_watch(self, recorder: RunRecorder | None, book: TimeBook) -> PlanWatch | None:
        """Return rank 0's hook that compares the run with its plan, or None if this machine is unknown.

        All ranks get the planned step time, because each detects hangs separately.
        """
        engine, found = self.engine, None
        if recorder:
            with engine.pulse.doing("asks the planner what to expect"):
                found = PlanWatch.of(
                    self.task, self.folder.plan(), engine.device, book, recorder.on_figures, recorder.on_note
                )
        engine.pulse.planned_s = engine.on_first(lambda: found.step_s if found else 0.0)
        return found

    def _parting(self, keeper: Keeper, trainer: Trainer) -> RunRequest | None:
        """Return the request that the launcher must act on. All ranks call it.

        A request to return to an older checkpoint becomes a pause if there is no such checkpoint.
        """
        wish, step = trainer.parting, trainer.progress.step
        if wish is None or wish.action == "stop":
            return None
        if wish.action in GOES_BACK:
            keeper.drop_copies()
        if wish.action in GOES_BACK and self.engine.on_first(lambda: roll_back(self.folder, wish, step)) is None:
            return replace(wish, action="hold", why=f"{wish.why}; there is no older checkpoint to try".lstrip("; "))
        return wish

    def _watch_resources(self, began: float) -> TimeLimit | None:
        """Check disk space for a checkpoint before the first step, and return a time limit if one is set.

        Raises:
            CheckpointError: if the disk is too full to save.
        """
        limit, num_bytes = self.config.train.max_time, self.engine.checkpoint_bytes()
        require_space(located(self.config.checkpoint.dir or self.folder.path), num_bytes)
        if not limit:
            return None
        # With late results the host reads each step one step later, which adds up to two steps.
        more = 2 if self.engine.device.startswith("cuda") else 0
        return TimeLimit(limit, began + parse_seconds(limit), num_bytes, steps_to_stop=2 + more)

    def _show(self, recorder: RunRecorder, step: int, reason: str) -> str:
        """Return a sample of the trained model, while the panel is still visible."""
        recorder.on_phase("sampling")
        # A user who stops a run should not wait seconds for a sample.
        if reason.startswith("asked to ") or self.engine.wants_stop:
            return ""
        with self.engine.pulse.doing("writes a sample"):
            return self.task.show(self.folder, step)

    def _recorder(self, progress: Progress, notes: list[str]) -> RunRecorder:
        config, engine = self.config, self.engine
        tell(self.terminal, [*opening_lines(self.folder, self.task, engine), *notes])
        epoch, places = engine.batches.samples_per_epoch, StepBorders.of(engine.batches, config.train.global_batch)
        display = make_display(
            self.terminal,
            total_steps=config.train.steps,
            start_step=progress.step,
            every=config.log.every,
            title=(config.run.name, str(engine.plan)),
            steps_per_epoch=places.steps(epoch) if epoch is not None else None,
            past=tail_events(self.folder.events) if progress.step else (),
            metrics={metric.name: metric.label for metric in self.task.metrics},
        )
        self.voice.display = display
        start: dict[str, object] = {
            "model": self.task.model_line(),
            "plan": str(engine.plan),
            "world_size": engine.plan.world_size,
            "device": engine.device.partition(":")[0],
            **context(self.folder, config),
            **engine.versions(),
        }
        recorder = RunRecorder(self.folder, self.task, display, start)
        self.voice.log = recorder.on_figures
        return recorder


# A run that is one of several replicas with separate worlds: its start, and its end among the others.


class ReplicaCoordinator:
    """Coordinates a replica's run with the others, through its engine and their folders. All ranks call it together.

    `is_unsaved` is True if no checkpoint of this replica has its initial weights.

    Args:
        folder: folder of this replica.
        config: the run's config.
        engine: engine of this replica.
        is_alone: there are no other replicas, and every method does nothing.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, engine: Engine, *, is_alone: bool = False):
        self.is_unsaved, self._is_alone = False, is_alone
        self._folder, self._config, self._engine = folder, config, engine
        self._joint_parts = RankGroup(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)

    def elsewhere(self, own: int | None) -> Location | None:
        """Return the checkpoint of another replica to resume from, or None to resume from this replica's own.

        Args:
            own: step of this replica's newest checkpoint, or None.
        """
        if self._is_alone or self._config.resume.step:
            return None
        path = self._newest(self._engine.on_first(lambda: newest_of_others(self._folder, own)))
        self.is_unsaved = path is not None
        return path

    def rejoin(self, keeper: Keeper, progress: Progress) -> bool:
        """Join replicas that are further, before the first step. Return False if a stop was requested meanwhile.

        Args:
            keeper: this replica's checkpoints.
            progress: receives the step to continue from.
        """
        if self._is_alone:
            return True
        saved = self._engine.state()
        with stop_on_signal(self._engine):
            step = self._engine.rejoin(progress.step)
        if step is None:
            return False
        self.is_unsaved = self.is_unsaved or self._engine.state() != saved
        if step != progress.step:
            keeper.moved(progress.step, step)
            progress.step = step
        return True

    def end(self, keeper: Keeper, trainer: Trainer, reason: str) -> str:
        """Send the others the end of this replica, or load their model if they have ended. Return the reason.

        Args:
            keeper: this replica's checkpoints.
            trainer: a trainer that has ended and saved.
            reason: why it ended.
        """
        if self._is_alone:
            return reason
        over = self._engine.over
        if over is None:
            if reason != ASKED_TO_STOP and trainer.parting is None:
                self._engine.end()
            return reason
        if not self._take_over(over, keeper, trainer.progress):
            return f"{reason} at step {over['step']}; the machine of replica {over['replica']} has their model"
        return f"{reason}; their model, of step {over['step']}, was taken over"

    def _take_over(self, over: Mapping[str, Any], keeper: Keeper, progress: Progress) -> bool:
        """Load the model of replicas that have ended and save it here, if this machine can read it."""
        engine, where = self._engine, RunFolder(Path(over["where"]))
        path = self._newest(engine.on_first(lambda: _checkpoints_of(where, int(over["token"]))))
        if path is None:
            return False
        keeper.ended(True)
        with engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            engine.load(checkpoint)
        taken = Progress(**checkpoint.state["progress"])
        keeper.moved(taken.step + 1, taken.step)
        for one in fields(taken):
            setattr(progress, one.name, getattr(taken, one.name))
        keeper.save(progress, True, last=True)
        keeper.ended(True)
        return True

    def _newest(self, root: str | None) -> Location | None:
        found = None if root is None else newest_checkpoint(located(root), together=self._joint_parts)
        return None if found is None else found.path


def newest_of_others(folder: RunFolder, own: int | None) -> str | None:
    """Return the checkpoints folder of another replica to resume from, or None to use the replica's own.

    Args:
        folder: folder of the replica.
        own: step of its newest checkpoint, or None.
    """
    newest: list[tuple[int, str]] = []
    for other in folder.other_replicas():
        if saved := list_checkpoints(other.checkpoints):
            checkpoint = load_checkpoint(saved[-1], lazily=True)
            by_one = checkpoint.state.get("replica")
            # A checkpoint that a replica saved alone is used by another one only as a last resort: they share only the
            # anchor, which before the first outer step is everyone's initial model.
            if (own is None or checkpoint.step > own) if by_one is None else (own is None and by_one["meetings"] > 0):
                newest.append((checkpoint.step, str(other.checkpoints)))
    return max(newest)[1] if newest else None


def _checkpoints_of(folder: RunFolder, token: int) -> str | None:
    """Return the checkpoints folder of an ended replica if its newest checkpoint has the anchor with that token."""
    if not (folder.path / "config.toml").is_file() or not (saved := list_checkpoints(folder.checkpoints)):
        return None
    of_replica = load_checkpoint(saved[-1], lazily=True).state.get("replica") or {}
    return str(folder.checkpoints) if of_replica.get("token") == token else None
