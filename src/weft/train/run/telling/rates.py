"""What more steps do to the learning rate: schedules that end at the last step are stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.optim import lr_factor
from weft.spec import RunConfig
from weft.spec.config import ScheduleSection

#: A change of the rate that is worth a line.
_WORTH_TELLING = 0.02


def rate_state(config: RunConfig) -> dict[str, Any]:
    """Return what decides the rate of every step, as a checkpoint keeps it."""
    return {
        "steps": config.train.steps,
        "lr": config.optimizer.lr,
        "schedule": config.schedule.model_dump(mode="json"),
    }


def rate_change(config: RunConfig, step: int, before: Mapping[str, Any] | None) -> list[str]:
    """Return lines for a run that resumes with another number of steps than before.

    Args:
        config: of the run.
        step: the steps done.
        before: `rate_state` of the run that saved; None of a checkpoint that has none.
    """
    if not before or before["steps"] == config.train.steps or step >= config.train.steps or not step:
        return []
    schedule = ScheduleSection.model_validate(before["schedule"])
    old = before["lr"] * lr_factor(step - 1, before["steps"], schedule)
    new = config.optimizer.lr * lr_factor(step, config.train.steps, config.schedule)
    told = stretched(config, old, new)
    return [f"train.steps={config.train.steps} (before: {before['steps']}): {told}"] if told else []


def more_steps(config: RunConfig, num_steps: int) -> str:
    """What happens to the rate of a finished run that goes on to `num_steps`, or ''."""
    done = config.train.steps
    now = config.optimizer.lr * lr_factor(done - 1, done, config.schedule)
    later = config.model_copy(update={"train": config.train.model_copy(update={"steps": num_steps})})
    return stretched(later, now, config.optimizer.lr * lr_factor(done, num_steps, config.schedule))


def stretched(config: RunConfig, old: float, new: float) -> str:
    """The change from one step's rate to the next one's in words, with what keeps the rate; '' where it is small."""
    if abs(new - old) <= _WORTH_TELLING * max(old, new):
        return ""
    way = "up" if new > old else "down"
    kind = config.schedule.kind
    ends = "" if kind == "constant" else f"the {kind} schedule then ends at step {config.train.steps}: "
    return (
        f"{ends}lr goes from {old:.1e} {way} to {new:.1e}; to keep the old rate: schedule.kind=constant "
        f"optimizer.lr={old:.3g}"
    )
