"""What an engine gives of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss: mean over the `count` that the task counts, before the update. grad_norm: before clipping. skipped: why the
    weights were left as they were, or None. wants_stop: some rank asked to stop.
    """

    loss: float
    grad_norm: float
    count: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False


class LateResult(StepResult):
    """A result whose numbers are still on the device: the first look at one waits for them. All ranks look.

    The loop looks when the next step is launched, so that the device always has work. read: waits for the numbers.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], StepResult]):
        object.__setattr__(self, "_read", read)

    def __getattr__(self, name: str) -> Any:
        if name not in StepResult.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._read()
        for one in fields(StepResult):
            object.__setattr__(self, one.name, getattr(found, one.name))
        return getattr(found, name)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: mean over the `count` that the task counts. metrics: the task's own by name; None: unknown."""

    loss: float
    count: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
