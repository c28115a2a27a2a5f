"""The run folder: everything one run needs and leaves behind.

runs/<name>/
  config.toml      the resolved config        plan.txt    the resolved plan, one line
  events.jsonl     one line per step, evaluation, checkpoint
  logs/rank_N.log  output of each rank        loss.png
  checkpoints/     step_NNNNNNNN/ (safetensors + JSON)
  .lock            held by the command that trains here (run_lock.py)

and what the task keeps there. The decoder on text keeps:
  model.json       its shape                  data.json   where the tokenised data lies
  tokenizer/       a copy, so that the folder can be moved
  samples/         step_N.txt
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, ConfigError, PlanError, Problem
from weft.spec import Layout, RunConfig
from weft.spec.files import as_toml, format_config, load_config, parse_config
from weft.spec.plan import Plan
from weft.spec.rules import check
from weft.train.run.epochs import with_steps
from weft.train.run.run_lock import run_lock
from weft.train.task import Report, Task
from weft.train.tasks import find_task
from weft.train.tasks.task_choice import changed_keys, value_at

#: Settings that decide what the weights of a step are, beside those of the task: another value is another run.
_BEFORE_TASK, _AFTER_TASK = ("seed", "task"), ("train.global_batch", "optimizer.name")


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run's folder.

    texts: contents of config.toml, plan.txt and the task's files as `prepare_run` settled them. A rank gets them by
    value: what happens to the files afterwards does not reach a run under way. Empty: the files are read.
    """

    path: Path
    texts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of one step; CheckpointError names the steps that were saved."""
        from weft.checkpoint import list_checkpoints

        saved = {
            int(path.name.split(".")[0].removeprefix("step_")): path for path in list_checkpoints(self.checkpoints)
        }
        if step not in saved:
            known = ", ".join(map(str, saved)) or "none"
            raise CheckpointError(f"step={step}: {str(self.path)!r} has no such checkpoint. Saved steps: {known}.")
        return saved[step]

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    def config(self) -> RunConfig:
        """The resolved config."""
        if "config.toml" in self.texts:
            return parse_config(self.texts["config.toml"], str(self.path / "config.toml")).config
        return load_config(self._needed("config.toml")).config

    def plan(self) -> Plan:
        """The resolved plan."""
        return Plan.parse(self.text("plan.txt").strip())

    def text(self, name: str) -> str:
        """Contents of one of the files that `prepare_run` wrote. ConfigError where it is missing."""
        return self.texts[name] if name in self.texts else self._needed(name).read_text(errors="replace")

    def _needed(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise ConfigError(
                f"run folder {str(self.path)!r}: it has no {name}, so it is not a run folder of Weft. "
                f"Give a folder that `weft train` made, such as runs/quickstart."
            )
        return file


def prepare_run(config: RunConfig, world_size: int, report: Report | None = None, *, locked: bool = False) -> RunFolder:
    """Check everything that can be checked before ranks start, make the data ready, and write the run folder.

    Called by one process, before any process group exists. locked: whether the caller holds `run_lock`, as a command
    does for the whole of its run; else the folder is held while this function works.
    Raises the WeftError of what is wrong, LaunchError where another command trains in the folder; then nothing in an
    existing folder was changed.
    """
    folder = run_folder(config)
    with contextlib.nullcontext() if locked else run_lock(folder.path):
        return _prepare(folder, config, world_size, report)


def run_folder(config: RunConfig) -> RunFolder:
    """The folder of the config's run, which need not exist."""
    return RunFolder(Path(config.run.dir) / config.run.name)


def _prepare(folder: RunFolder, config: RunConfig, world_size: int, report: Report | None) -> RunFolder:
    task, plan = find_task(config), Plan.parse(config.plan, world_size)
    # Shapes are checked before data is made ready: minutes of work must not end in a sentence about heads.
    _check_plan(plan, task, world_size)
    # After the rules: a setting that no run can have must not be told as one that this run does not have.
    if (folder.path / "config.toml").exists():
        refuse_other_run(folder, config, task)
    config = task.config = _with_own_layout(config, task, plan)
    _check_optimizer(config, task)
    task.prepare(folder, report)
    config, notes = with_steps(config, task)
    task.config = config
    _check_plan(plan, task, world_size)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        texts = {"plan.txt": plan.format() + "\n", **task.keep(folder, notes), "config.toml": format_config(config)}
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
            f"{'without it' if old is None else f'with {old}'}, and cannot go on with another value. "
            f"Use {free_name(folder)} for a new run, or {_as_typed(name, old)} to resume.",
        )
        for name, old, new in (*changes, *task.changes(before))
    ]
    if problems:
        raise ConfigError(problems)


def free_name(folder: RunFolder) -> str:
    """A setting that makes a new run, to be pasted on a command line."""
    base, number = folder.path.name, 2
    while (folder.path.parent / f"{base}-{number}").exists():
        number += 1
    return f"run.name={base}-{number}"


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
    from weft.parallel.tensor import check_layout
    from weft.parallel.tensor.cut_tensors import expect_used

    layout = Layout.read(config.layout)
    model = task.shapes()
    expect_used(layout, dict(model.named_modules()))
    if plan.tp > 1:
        check_layout(model, layout, plan.tp)
    return config.model_copy(update={"layout": layout.format()})


def _check_optimizer(config: RunConfig, task: Task) -> None:
    """Refuse groups and classes that do not suit the model before data is made ready. Raises ConfigError."""
    if config.optimizer.groups or config.optimizer.is_foreign:
        from weft.optim import check_optimizer

        check_optimizer(task.shapes(), config.optimizer)


def _write(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
