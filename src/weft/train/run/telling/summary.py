"""What a run says of itself before its first step and after its last."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.monitor import goodput, last_per_step, read_events
from weft.train.engine import Engine
from weft.train.folder import RunFolder
from weft.train.loop import Progress
from weft.train.run.telling.rates import more_steps
from weft.train.task import Metric, Task
from weft.units import counted

#: What every run leaves in its folder, beside what the task does.
_CONTENTS = ("events.jsonl", "loss.png")


def opening_lines(folder: RunFolder, task: Task, engine: Engine) -> list[str]:
    """Return run, model, data, plan and precision, one line each.

    Args:
        folder: of the run.
        task: what is trained.
        engine: what computes.
    """
    plan, device = engine.plan, engine.device.partition(":")[0]
    return [
        f"run     {folder.path}",
        f"model   {task.model_line()}",
        *(f"data    {line}" for line in task.data_lines()),
        f"batch   {task.batch_line()}",
        f"plan    {plan} on {counted(plan.world_size, f'{device} rank')}",
        *engine.lines(),
    ]


def with_setting(command: Sequence[str], folder: RunFolder, key: str, value: object) -> str:
    """Return the command that started the run with one setting changed, to be pasted into a shell.

    Args:
        command: its words; where nobody knows them (a run started from Python), the folder's own config is named.
        folder: of the run.
        key: of the setting.
        value: of the setting.
    """
    words = list(command) or ["weft", "train", str(folder.path / "config.toml")]
    # Steps and epochs say the same thing, and are refused together.
    replaced = ("train.steps=", "train.epochs=") if key == "train.steps" else (f"{key}=",)
    kept = [word for word in words if not word.startswith((*replaced, "resume.step="))]
    return shlex.join([*kept, f"{key}={value}"])


def _go_on(command: Sequence[str]) -> str:
    """How an unfinished run goes on; the command that went back to an older step would go back once more."""
    kept = [word for word in command if not word.startswith("resume.step=")]
    if len(kept) < len(command):
        return f"{shlex.join(kept)}   continues from here"
    return "the same command continues from here"


def already_done(folder: RunFolder, task: Task, step: int, command: Sequence[str] = ()) -> list[str]:
    """Return the lines for a run whose last step is done.

    Args:
        folder: of the run.
        task: what was trained.
        step: the steps done.
        command: the words that the user typed.
    """
    told, try_it = more_steps(task.config, step * 2), task.try_line(folder)
    return [
        f"{folder.path} is complete: {step} steps are done.",
        f"Train for more steps:  {with_setting(command, folder, 'train.steps', step * 2)}",
        *([f"                        {told}"] if told else []),
        *([f"Try the model:          {try_it}"] if try_it else []),
    ]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended. reason: "finished", or why before. shown: what the model makes. times: where the time went."""

    progress: Progress
    reason: str
    shown: str = ""
    times: Sequence[str] = ()


def closing_lines(folder: RunFolder, task: Task, ending: Ending, command: Sequence[str] = ()) -> list[str]:
    """Return how it ended, how the loss fell, what the model makes, where the time went, and what to type next.

    Args:
        folder: of the run.
        task: what was trained.
        ending: how.
        command: the words that the user typed.
    """
    config, progress = task.config, ending.progress
    evaluations = last_per_step(read_events(folder.events), kind="eval")
    lines = [""]
    if shown := [line.rstrip() for line in ending.shown.rstrip().splitlines()]:
        lines += [f"{'        ' if number else 'sample  '}{line}".rstrip() for number, line in enumerate(shown)] + [""]
    if ending.reason == "finished":
        lines.append(f"done    {counted(progress.step, 'step')}")
    else:
        lines.append(f"stopped at step {progress.step} of {config.train.steps}: {ending.reason}")
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        fall = f"{evaluation_text(first, task.metrics)}  ->  " if first["step"] != last["step"] else ""
        lines.append(f"eval    {fall}{evaluation_text(last, task.metrics)}")
        lines += [f"        {one.words}: {one.help}" for one in task.metrics if one.help and last.get(one.name)]
    lines += [
        *ending.times,
        *_saves(folder),
        *goodput(read_events(folder.events)).lines(config.checkpoint.every),
        f"folder  {folder.path}: {', '.join(_CONTENTS + task.leaves)}, checkpoints/, logs/",
    ]
    try_it = task.try_line(folder)
    next_lines: list[str] = [try_it] if try_it else []
    if progress.step < config.train.steps:
        next_lines.append(_go_on(command))
    else:
        wanted = config.train.steps * 2
        next_lines.append(f"{with_setting(command, folder, 'train.steps', wanted)}   continues from here")
        if told := more_steps(config, wanted):
            next_lines.append(told)
    return [*lines, *(f"{'        ' if place else 'next    '}{line}" for place, line in enumerate(next_lines))]


def _saves(folder: RunFolder) -> list[str]:
    """What the saves of the last start cost, or nothing where there were none."""
    found: list[dict[str, Any]] = []
    for event in read_events(folder.events):
        if event["event"] == "start":
            found.clear()
        elif event["event"] == "checkpoint" and "stall_s" in event:
            found.append(event)
    if not found:
        return []
    stall, durable = (statistics.median(float(one[key]) for one in found) for key in ("stall_s", "durable_s"))
    number, median = counted(len(found), "checkpoint"), " (medians)" if len(found) > 1 else ""
    return [f"saves   {number}: training waited {stall:.3f} s, on disk after {durable:.3f} s{median}"]


def evaluation_text(event: dict[str, Any], metrics: Sequence[Metric]) -> str:
    """Say what an evaluation found."""
    # What is not finite stands in the log as a word.
    text = f"step {event['step']}: loss {float(event['loss']):.3f}"
    return text + "".join(f", {float(event[one.name]):.3f} {one.words}" for one in metrics if event.get(one.name))
