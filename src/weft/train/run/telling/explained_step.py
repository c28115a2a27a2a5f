"""A step that went wrong, in words: what its trace found, and the samples as the model saw them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ConfigError, DataError, WeftError
from weft.train.folder import RunFolder
from weft.train.task import Task
from weft.train.tasks import find_task

_MOST_STEPS = 10
#: What training wrong samples may raise in a task's own code: files that are gone, tables that are shorter.
_UNREADABLE = (OSError, LookupError, ValueError, TypeError)


def seen_digests(task: Task, event: Mapping[str, Any]) -> list[str]:
    """Return digests of the samples of a trace, by which a later reader knows whether they are the same.

    An empty name: the task cannot show the sample.
    """
    found = []
    for place in event.get("samples", ()):
        try:
            found.append(_digest(task.sample_lines(place)))
        except (WeftError, *_UNREADABLE):
            found.append("")
    return found


def explained_lines(folder: RunFolder, step: int | None, num_samples: int) -> list[str]:
    """Return what is known of a step that went wrong, and its samples.

    Args:
        folder: of the run.
        step: counted from 1; None: the last one that was traced.
        num_samples: at most so many are shown.

    Raises:
        ConfigError: for a folder of no run, and a step without a trace.
        DataError: for data that is gone, or is no longer what the step saw.
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
    """What the trace found, by name."""
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
    """The newest trace of a step."""
    traces: dict[int, dict[str, Any]] = {}
    try:
        with open(folder.events, "rb") as file:
            for line in file:
                # A long log has millions of other lines.
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
    """Return the error for samples that cannot be read: Weft's own as it is, others in one sentence."""
    if isinstance(error, WeftError):
        return error
    return DataError(
        f"{folder.path}: the samples of step {step} cannot be read ({type(error).__name__}: {error}). Bring back the "
        "data that the run was started with."
    )
