"""Reports of a run for users: learning rate changes, waits, bad steps, and the opening and end of a run."""

from __future__ import annotations

import hashlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from weft.config.run_config import RunConfig
from weft.config.sections import ScheduleSection
from weft.errors import ConfigError, DataError, WeftError
from weft.monitor.accounting import TimeLedger, goodput
from weft.monitor.events import last_per_step, read_events
from weft.monitor.live import Display
from weft.monitor.terminal import LastingStream
from weft.optim.schedule import lr_factor
from weft.train.engine import Engine
from weft.train.folder import RunFolder
from weft.train.hooks import Progress
from weft.train.tasks.base import Metric, Task
from weft.train.tasks.registry import find_task
from weft.units import counted

#: Minimum relative change of the learning rate that is reported.
_WORTH_TELLING = 0.02


def rate_change(config: RunConfig, step: int, before: Mapping[str, Any] | None) -> list[str]:
    """Return a message if resuming with a different number of steps changes the learning rate by over 2 %, else [].

    Args:
        before: value "rate" in the state of the run that saved; None if the checkpoint lacks it.
    """
    if not before or before["steps"] == config.train.steps or step >= config.train.steps or not step:
        return []
    schedule = ScheduleSection.model_validate(before["schedule"])
    old = before["lr"] * lr_factor(step - 1, before["steps"], schedule)
    new = config.optimizer.lr * lr_factor(step, config.train.steps, config.schedule)
    told = stretched(config, old, new)
    return [f"train.steps={config.train.steps} (before: {before['steps']}): {told}"] if told else []


def more_steps(config: RunConfig, num_steps: int) -> str:
    """Describe the change of the learning rate if a finished run continues to `num_steps`, or return "" up to 2 %."""
    done = config.train.steps
    now = config.optimizer.lr * lr_factor(done - 1, done, config.schedule)
    later = config.model_copy(update={"train": config.train.model_copy(update={"steps": num_steps})})
    return stretched(later, now, config.optimizer.lr * lr_factor(done, num_steps, config.schedule))


def stretched(config: RunConfig, old: float, new: float) -> str:
    """Describe how the learning rate changes and how to avoid it. Return "" if it changes by at most 2 %."""
    if abs(new - old) <= _WORTH_TELLING * max(old, new):
        return ""
    way = "up" if new > old else "down"
    kind = config.schedule.kind
    ends = "" if kind == "constant" else f"the {kind} schedule then ends at step {config.train.steps}: "
    return (
        f"{ends}lr goes from {old:.1e} {way} to {new:.1e}; to keep the old rate: schedule.kind=constant "
        f"optimizer.lr={old:.3g}"
    )


# Messages that this rank waits for another one.


class RunLogger:
    """Prints messages about this rank waiting for others, above the progress display if any, and logs events."""

    def __init__(self, stream: TextIO):
        self._stream = LastingStream(stream)
        self.display: Display | None = None
        #: Function that writes events on rank 0 during training, else None.
        self.log: Callable[[Mapping[str, object]], None] | None = None

    def record(self, event: Mapping[str, object]) -> None:
        """Write an event if this rank has an event log at present."""
        if self.log is not None:
            self.log(event)

    def show(self, text: str) -> None:
        """Print a line above the progress display, or to the stream without a display. Print it to stderr too."""
        if self.display is not None:
            self.display.note(text)
        else:
            self._stream.write(f"weft: {text}\n")
            self._stream.flush()
        print(text, file=sys.stderr, flush=True)


# Explanation of a step that went wrong: its trace, and the samples in its batch.

_MOST_STEPS = 10
#: Errors that a task's code may raise if files are missing or tables have become shorter.
_UNREADABLE = (OSError, LookupError, ValueError, TypeError)


def sample_digests(task: Task, event: Mapping[str, Any]) -> list[str]:
    """Return digests of a trace's samples, to detect later changes of the data.

    A digest is empty if the task cannot show the sample.
    """
    found = []
    for place in event.get("samples", ()):
        try:
            found.append(_digest(task.sample_lines(place)))
        except (WeftError, *_UNREADABLE):
            found.append("")
    return found


def explained_lines(folder: RunFolder, step: int | None, num_samples: int) -> list[str]:
    """Return a report on a step that went wrong, with its samples.

    Args:
        folder: the run's folder.
        step: the step, counted from 1; None for the last one that was traced.
        num_samples: maximum number of samples in the report.

    Raises:
        ConfigError: if the folder is not a run, or the step has no trace.
        DataError: if the data is missing or has changed since the step, or the event log cannot be read.
    """
    config = folder.config()
    event = _trace_of(folder, step)
    task = find_task(config)
    number = event["step"]
    lines = [f"step {number}: {event.get('text', '')}.", *_facts(event)]
    samples, digests = list(event.get("samples", ())), list(event.get("seen", ()))
    try:
        task.open(folder)
    except _UNREADABLE as error:
        raise _gone(folder, number, error) from error
    for place, digest in list(zip(samples, [*digests, *[""] * len(samples)], strict=False))[:num_samples]:
        try:
            shown = list(task.sample_lines(place))
        except _UNREADABLE as error:
            raise _gone(folder, number, error) from error
        if digest and digest != _digest(shown):
            raise DataError(
                f"{folder.path}: sample {place} is not the one that step {number} saw: the data has changed since, or "
                "the task draws its samples at random. Bring back the data as it was."
            )
        lines += ["", f"--- sample {place}", *shown]
    if len(samples) > num_samples:
        lines += ["", f"{len(samples) - num_samples} more: --num {len(samples)}"]
    return lines


def _facts(event: Mapping[str, Any]) -> list[str]:
    samples = ", ".join(map(str, event.get("samples", ())))
    found = {
        "module": event.get("module"),
        "rank": event.get("rank"),
        "microbatch": event.get("microbatch"),
        "samples": samples,
        **event.get("figures", {}),
    }
    return [
        f"  {name.replace('_', ' '):<12}{f'{value:.6g}' if isinstance(value, float) else value}"
        for name, value in found.items()
        if value not in (None, "")
    ]


def _trace_of(folder: RunFolder, step: int | None) -> dict[str, Any]:
    traces: dict[int, dict[str, Any]] = {}
    try:
        with open(folder.events, "rb") as file:
            for line in file:
                # Parse only lines with traces, because a long log has millions of others.
                if b'"trace"' in line and (event := _event(line)) is not None:
                    traces[event["step"]] = event
                    newest = event["step"]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(f"{folder.events}: events cannot be read ({error.strerror}).") from error
    if step is None and traces:
        return traces[newest]
    if step in traces:
        return traces[step]
    known = sorted(traces)
    named = ", ".join(map(str, known[-_MOST_STEPS:]))
    if not known:
        text = (
            "none of its steps went wrong, so there is no trace. Steps with a loss or gradient that is not finite and "
        )
        text += "jumps of the loss have one."
    elif len(known) > _MOST_STEPS:
        text = f"this step has no trace. {len(known)} steps have one, the last {_MOST_STEPS}: {named}."
    else:
        text = f"this step has no trace. Use {'--step ' if len(known) == 1 else 'one of '}{named}."
    raise ConfigError(f"{folder.path}{'' if step is None else f', --step {step}'}: {text}")


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(event, dict) and event.get("event") == "trace" and isinstance(event.get("step"), int)
    return event if is_one else None


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _gone(folder: RunFolder, step: int, error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    return DataError(
        f"{folder.path}: the samples of step {step} cannot be read ({type(error).__name__}: {error}). Bring back the "
        "data that the run was started with."
    )


# Reports of a run before its first step and after its last.

#: Files that every run writes into its folder, in addition to the task's.
_CONTENTS = ("events.jsonl", "loss.png")


def opening_lines(folder: RunFolder, task: Task, engine: Engine) -> list[str]:
    """Return lines with run, model, data, plan and precision, to print at the start.

    Args:
        folder: the run's folder.
        task: the task to train.
        engine: the engine that trains it.
    """
    plan, device = engine.plan, engine.device.partition(":")[0]
    return [
        f"run     {folder.path}",
        f"model   {task.model_line()}",
        *(f"data    {line}" for line in task.data_lines()),
        f"batch   {task.batch_line()}",
        f"plan    {plan} on {counted(plan.world_size, f'{device} rank')}",
        *engine.reports.opening(),
    ]


def with_setting(command: Sequence[str], folder: RunFolder, key: str, value: object) -> str:
    """Return the command that started the run with one setting changed, for pasting into a shell.

    A `resume.step` in the command is removed.

    Args:
        command: its arguments. If empty (a run started from Python), the folder's config is used.
    """
    words = list(command) or ["weft", "train", str(folder.path / "config.toml")]
    # `train.steps` and `train.epochs` exclude each other.
    replaced = ("train.steps=", "train.epochs=") if key == "train.steps" else (f"{key}=",)
    kept = [word for word in words if not word.startswith((*replaced, "resume.step="))]
    return shlex.join([*kept, f"{key}={value}"])


def _go_on(command: Sequence[str]) -> str:
    kept = [word for word in command if not word.startswith("resume.step=")]
    if len(kept) < len(command):
        return f"{shlex.join(kept)}   continues from here"
    return "the same command continues from here"


def already_done(folder: RunFolder, task: Task, step: int, command: Sequence[str] = ()) -> list[str]:
    """Return a message for a run whose last step is done, with commands to train longer and to try the model.

    Args:
        folder: the run's folder.
        task: the trained task.
        step: steps done.
        command: the command line of the user.
    """
    train = task.config.train
    if step < train.steps:
        return [f"{folder.path}: {step} of {train.steps} steps are done, and train.stop_at={train.stop_at}."]
    told, try_it = more_steps(task.config, step * 2), task.try_line(folder)
    return [
        f"{folder.path} is complete: {step} steps are done.",
        f"Train for more steps:  {with_setting(command, folder, 'train.steps', step * 2)}",
        *([f"                        {told}"] if told else []),
        *([f"Try the model:          {try_it}"] if try_it else []),
    ]


@dataclass(frozen=True, slots=True)
class Ending:
    """Outcome of a run.

    Attributes:
        reason: "finished", or why the run stopped early.
        shown: a sample output of the model, or "".
        times: lines of the time report.
    """

    progress: Progress
    reason: str
    shown: str = ""
    times: Sequence[str] = ()


def closing_lines(folder: RunFolder, task: Task, ending: Ending, command: Sequence[str] = ()) -> list[str]:
    """Return lines with the outcome, the evaluations, a sample output, the time report, and useful next commands.

    Args:
        folder: the run's folder.
        task: the trained task.
        ending: the outcome of the run.
        command: the command line of the user.
    """
    config, progress = task.config, ending.progress
    events = read_events(folder.events)
    evaluations = last_per_step(events, kind="eval")
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
    ledger = TimeLedger().feed_all(events)
    lines += [
        *ending.times,
        *(ledger.energy_summary().lines(task.unit) if config.energy.meter else []),
        *_saves(folder),
        *goodput(events).lines(config.checkpoint.every),
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
    """Return the values of an evaluation as text."""
    # The log stores inf and NaN as strings.
    text = f"step {event['step']}: loss {float(event['loss']):.3f}"
    return text + "".join(f", {float(event[one.name]):.3f} {one.words}" for one in metrics if event.get(one.name))
