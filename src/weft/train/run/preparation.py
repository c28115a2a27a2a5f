"""Before ranks start: everything of a run is checked, its data made ready, and its folder written."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, PlanError, Problem
from weft.spec import Layout, RunConfig
from weft.spec.config import changed_keys, value_at
from weft.spec.files import format_config
from weft.spec.plan import Plan
from weft.spec.rules import check
from weft.spec.written import as_toml
from weft.train.folder import RunFolder, free_name, run_folder
from weft.train.loop import LEFT_OUT
from weft.train.run.epochs import with_steps
from weft.train.run.folder_lock import new_files_like, run_lock
from weft.train.task import Report, Task, with_adapter
from weft.train.tasks import find_task

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
    from weft.parallel.tensor import check_layout, expect_used
    from weft.structure.layouts import expect_parts_named

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
        from weft.optim import check_optimizer

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
