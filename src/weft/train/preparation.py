"""train.epochs as train.steps, once the data is known."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.config.config_rules import config_problems
from weft.config.files import format_config
from weft.config.layout import Layout
from weft.config.plan import Plan
from weft.config.plan_rules import check
from weft.config.run_config import RunConfig
from weft.config.setting_types import changed_keys, value_at
from weft.config.toml_values import as_toml
from weft.errors import ConfigError, PlanError, Problem
from weft.train.checkpointer import Keeper
from weft.train.engine import Engine
from weft.train.folder import RunFolder, free_name, new_files_like, run_folder, run_lock
from weft.train.hooks import LEFT_OUT, Progress
from weft.train.signals import stop_on_signal
from weft.train.tasks.base import Report, Task
from weft.train.tasks.indexed import with_adapter
from weft.train.tasks.registry import find_task
from weft.train.trainer import ASKED_TO_STOP, Trainer


def with_steps(config: RunConfig, task: Task) -> tuple[RunConfig, list[str]]:
    """The config with the steps that its epochs take, and a line that tells them; without epochs the config as it is.

    task: its data is ready. Raises ConfigError where the steps break a rule between settings, such as a warm-up that
    is longer.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config, []
    num_samples = task.samples_per_epoch()
    steps = task.places().step_at(max(1, math.ceil(epochs * num_samples)) - 1) + 1
    # From here on the steps alone count: what is resumed with more of them is not asked for its epochs again.
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    config = config.model_copy(update={"train": train})
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    most = config.train.global_cost
    a_step = config.train.global_batch if most is None else f"a cost of {most:g}"
    told = f"train.epochs={epochs:g}: {num_samples} {task.sample_unit} an epoch, {a_step} a step: {steps} steps"
    return config, [told]


# A run that is one replica of several, each a world of its own: where it begins, and how it ends among the others.


class ReplicaCoordinator:
    """What a replica's run asks of the others, through its engine and through their folders; all ranks together.

    is_unsaved: whether no checkpoint of this replica has the weights that it begins with. Of a run that has no others
    nothing is asked.

    Args:
        folder: of this replica.
        config: of the run.
        engine: of this replica.
        is_alone: there are no others.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, engine: Engine, *, is_alone: bool = False):
        self.is_unsaved, self._is_alone = False, is_alone
        self._folder, self._config, self._engine = folder, config, engine
        self._joint_parts = RankGroup(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)

    def elsewhere(self, own: int | None) -> Location | None:
        """Return the checkpoint to go on from in the place of this replica's own; None: from its own.

        Args:
            own: step of its newest one, where it has one.
        """
        if self._is_alone or self._config.resume.step:
            return None
        path = self._newest(self._engine.on_first(lambda: newest_of_others(self._folder, own)))
        self.is_unsaved = path is not None
        return path

    def rejoin(self, keeper: Keeper, progress: Progress) -> bool:
        """Before the first step, join replicas that are further; False where this one was asked to stop meanwhile.

        Args:
            keeper: of this replica's checkpoints.
            progress: is set to the step to go on from.
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
        """Tell the others that this replica has ended, or take over their model where they have; why training ended.

        Args:
            keeper: of this replica's checkpoints.
            trainer: has ended, and saved.
            reason: why it has.
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
        """Take the model of replicas that have ended, and save it here, where this machine sees it."""
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
    """Return where checkpoints lie that a replica goes on from in the place of its own; None: from its own.

    Args:
        folder: of the replica.
        own: step of its newest checkpoint, where there is one.
    """
    newest: list[tuple[int, str]] = []
    for other in folder.other_replicas():
        if saved := list_checkpoints(other.checkpoints):
            checkpoint = load_checkpoint(saved[-1], lazily=True)
            by_one = checkpoint.state.get("replica")
            # What a replica saved for itself is taken by another one only in need: it has the anchor alone in common,
            # and before the first meeting that is what all begin with.
            if (own is None or checkpoint.step > own) if by_one is None else (own is None and by_one["meetings"] > 0):
                newest.append((checkpoint.step, str(other.checkpoints)))
    return max(newest)[1] if newest else None


def _checkpoints_of(folder: RunFolder, token: int) -> str | None:
    """Where the checkpoints of a replica that has ended lie, if the newest one has the anchor of that token."""
    if not (folder.path / "config.toml").is_file() or not (saved := list_checkpoints(folder.checkpoints)):
        return None
    of_replica = load_checkpoint(saved[-1], lazily=True).state.get("replica") or {}
    return str(folder.checkpoints) if of_replica.get("token") == token else None


# Before ranks start: everything of a run is checked, its data made ready, and its folder written.

#: Settings that decide what the weights of a step are, beside those of the task: another value is another run.
_BEFORE_TASK = ("seed", "task")
_AFTER_TASK = ("train.global_batch", "train.global_cost", "train.norm_group",
               "optimizer.name", "adapter")  # fmt: skip


def prepare_run(
    config: RunConfig,
    world_size: int,
    report: Report | None = None,
    *,
    locked: bool = False,
    replica: int | None = None,
) -> RunFolder:
    """Check everything that can be checked before ranks start, make the data ready, and write the run folder.

    Called by one process, before any process group exists.

    Args:
        config: the whole run.
        world_size: ranks that will train, of all replicas.
        report: called with (stage, done, total) while data is prepared.
        locked: whether the caller holds `run_lock`, as a command does for the whole of its run; else the folder is held
            while this function works.
        replica: which one this is for, where each is a world of its own.

    Raises:
        WeftError: the one of what is wrong; nothing in an existing folder was changed then.
        LaunchError: where another command trains in the folder.
    """
    folder = run_folder(config, replica)
    with contextlib.nullcontext() if locked else run_lock(folder.path, config.run.mode):
        return _prepare(folder, config, world_size, report)


def _prepare(folder: RunFolder, config: RunConfig, world_size: int, report: Report | None) -> RunFolder:
    task, plan = find_task(config), Plan.parse(config.plan, world_size)
    # Shapes are checked before data is made ready: minutes of work must not end in a sentence about heads.
    _check_plan(plan, task, world_size)
    # After the rules: a setting that no run can have must not be told as one that this run does not have.
    if (folder.path / "config.toml").exists():
        refuse_other_run(folder, config, task)
    config = task.config = _with_own_layout(config, task, plan)
    _check_optimizer(config, task)
    _check_best(config, task)
    task.prepare(folder, report)
    config, notes = with_steps(config, task)
    task.config = config
    _check_plan(plan, task, world_size)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with new_files_like(folder.path):
            texts = {"plan.txt": plan.format() + "\n", **task.keep(folder, notes)}
            texts["config.toml"] = format_config(config)
            if (folder.path / LEFT_OUT).is_file():
                texts[LEFT_OUT] = (folder.path / LEFT_OUT).read_text()
            for name, text in texts.items():
                _write(folder.path / name, text)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir}: cannot write {str(folder.path)!r} ({error.strerror}). Use another run.dir."
        ) from error
    return RunFolder(folder.path, texts)


def refuse_other_run(folder: RunFolder, config: RunConfig, task: Task) -> None:
    """ConfigError when the folder was started with settings that make a different run; names each of them."""
    before = folder.config()
    old, new = (settings.model_dump(mode="json", by_alias=True) for settings in (before, config))
    changes = [
        (name, *pair)
        for key in (*_BEFORE_TASK, *task.identity, *_AFTER_TASK)
        for name, pair in changed_keys(key, value_at(old, key), value_at(new, key)).items()
    ]
    problems = [
        Problem(
            name,
            f"{name}={'none' if new is None else new}: the run in {str(folder.path)!r} was started "
            f"{'without it' if old is None else f'with {old}'}, and cannot continue with another value. Use "
            f"{free_name(folder)} for a new run, or {_as_typed(name, old)} to resume.",
        )
        for name, old, new in (*changes, *task.changes(before))
    ]
    if problems:
        raise ConfigError(problems)


def _as_typed(name: str, value: Any) -> str:
    """What brings a setting back to its value: a word for the command line."""
    if value is None:
        return f"leave {name} out"
    return shlex.quote(f"{name}={value if isinstance(value, str) else as_toml(value)}")


def _check_plan(plan: Plan, task: Task, world_size: int) -> None:
    violations = check(plan, task.facts(world_size))
    if violations:
        raise PlanError("\n".join(violation.message for violation in violations))


def _with_own_layout(config: RunConfig, task: Task, plan: Plan) -> RunConfig:
    """The config with the words of its layout in the place of their file: the folder needs nothing outside of it.

    Raises LayoutError or PlanError where the layout does not fit the model or the plan's tp.
    """
    if not config.layout:
        return config
    from weft.models.inspect.find_layout import expect_parts_named
    from weft.parallel.tensor.read_layout import check_layout, expect_used

    layout = Layout.read(config.layout)
    model = task.shapes()
    expect_used(layout, dict(model.named_modules()))
    if plan.tp > 1:
        check_layout(model, layout, plan.tp)
        expect_parts_named(model, layout)
    return config.model_copy(update={"layout": layout.format()})


def _check_optimizer(config: RunConfig, task: Task) -> None:
    """Refuse what does not suit the model of adapter, groups and classes before data is ready. Raises ConfigError."""
    if config.optimizer.groups or config.optimizer.is_foreign or config.adapter.rank:
        from weft.optim.build import check_optimizer

        check_optimizer(with_adapter(task.shapes(), config), config.optimizer)


def _check_best(config: RunConfig, task: Task) -> None:
    """ConfigError where the best checkpoint is to be told by a metric that the task does not have."""
    by, known = config.checkpoint.best_by, ("loss", *(metric.name for metric in task.metrics))
    if by not in known:
        raise ConfigError(
            f"checkpoint.best_by={by}: this task's evaluations have no such metric. Use {' or '.join(known)}."
        )


def _write(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
