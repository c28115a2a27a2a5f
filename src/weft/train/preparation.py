"""Preparation of a run: converting epochs to steps, checks, and writing the run folder."""

from __future__ import annotations

import contextlib
import math
import shlex
from typing import Any

from weft.config.fields.layout import Layout
from weft.config.files import format_config
from weft.config.parsing import as_toml
from weft.config.plan import Plan
from weft.config.rules.config_rules import config_problems
from weft.config.rules.plan_rules import check
from weft.config.run_config import RunConfig
from weft.config.sections import changed_keys, value_at
from weft.errors import ConfigError, PlanError, Problem
from weft.files import replace_text
from weft.train.folder import RunFolder, free_name, new_files_like, run_folder, run_lock
from weft.train.hooks import LEFT_OUT
from weft.train.loop.cpu_evaluation import refuse_cpu_evaluation
from weft.train.tasks.base import Report, Task
from weft.train.tasks.registry import find_task
from weft.train.weights.run_adapter import started_values, with_adapter


def with_steps(config: RunConfig, task: Task) -> tuple[RunConfig, list[str]]:
    """Replace a config's epochs by the number of steps, and return it with lines that report the number.

    A config without epochs is returned unchanged. The task's data must be prepared.

    Raises:
        ConfigError: if the steps break a rule between settings, such as a warm-up that is longer than the run.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config, []
    num_samples = task.samples_per_epoch()
    steps = task.step_borders().step_at(max(1, math.ceil(epochs * num_samples)) - 1) + 1
    # From now on only the steps count: resuming with more steps must not compare epochs.
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    config = config.model_copy(update={"train": train})
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    most = config.train.global_cost
    a_step = config.train.global_batch if most is None else f"a cost of {most:g}"
    told = f"train.epochs={epochs:g}: {num_samples} {task.sample_unit} an epoch, {a_step} a step: {steps} steps"
    return config, [told]


# Work before ranks start: checking the run, preparing its data, and writing its folder.

#: Settings that determine the weights of a step, in addition to the task's. Changing one makes a different run.
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
    """Check everything that can be checked before ranks start, prepare the data, and write the run folder.

    Called by one process, before any process group exists.

    Args:
        config: the full config.
        world_size: number of training ranks of all replicas.
        report: called with (stage, done, total) while data is prepared.
        locked: True if the caller holds `run_lock`. Otherwise this function locks the folder while it works.
        replica: index of the replica, if each is a separate process group.

    Raises:
        WeftError: the subclass for the problem. An existing folder is then unchanged, unless writing its files failed.
        LaunchError: if another command trains in the folder.
    """
    folder = run_folder(config, replica)
    with contextlib.nullcontext() if locked else run_lock(folder.path, config.run.mode):
        return _prepare(folder, config, world_size, report)


def _prepare(folder: RunFolder, config: RunConfig, world_size: int, report: Report | None) -> RunFolder:
    task, plan = find_task(config), Plan.parse(config.plan, world_size)
    # Check shapes before preparing data, so that an invalid plan fails in seconds.
    _check_plan(plan, task, world_size)
    # Check the rules first, so that an invalid setting is not reported as a changed one.
    if (folder.path / "config.toml").exists():
        refuse_other_run(folder, config, task)
    config = task.config = _with_own_layout(config, task, plan)
    if config.optimizer.groups or config.optimizer.is_foreign or config.adapter.rank:
        from weft.optim.build import check_optimizer

        shapes = with_adapter(task.shapes(), config)
        check_optimizer(shapes, config.full_optimizer)
        started_values(shapes, config)
    refuse_cpu_evaluation(task)
    by, known = config.checkpoint.best_by, ("loss", *(metric.name for metric in task.metrics))
    if by not in known:
        raise ConfigError(
            f"checkpoint.best_by={by}: this task's evaluations have no such metric. Use {' or '.join(known)}."
        )
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
                replace_text(folder.path / name, text)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir}: cannot write {str(folder.path)!r} ({error.strerror}). Use another run.dir."
        ) from error
    return RunFolder(folder.path, texts, config)


def refuse_other_run(folder: RunFolder, config: RunConfig, task: Task) -> None:
    """Raise ConfigError if the folder's run was started with other values of settings that determine its weights.

    The error names each such setting.
    """
    before = RunFolder(folder.path).config()  # the settings of its first command, not of this one
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
    if value is None:
        return f"leave {name} out"
    return shlex.quote(f"{name}={value if isinstance(value, str) else as_toml(value)}")


def _check_plan(plan: Plan, task: Task, world_size: int) -> None:
    violations = check(plan, task.facts(world_size))
    if violations:
        raise PlanError("\n".join(violation.message for violation in violations))


def _with_own_layout(config: RunConfig, task: Task, plan: Plan) -> RunConfig:
    """Check the config's layout file, if any. Return the config with the file's contents instead of its path."""
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
