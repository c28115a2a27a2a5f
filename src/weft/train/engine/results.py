"""What an engine gives of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Which of a step's numbers is not as it should be: not finite, or far above what is usual.
TraceKind = Literal["loss", "gradient", "spike"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, equal on all ranks.

    loss: mean over the `count` that the task counts, before the update. grad_norm: before clipping. skipped: why the
    weights were left as they were, or None. wants_stop: some rank asked to stop. update_ratio: norm of the update over
    the norm of the weights, where it was measured. share: of the global batch that is counted here. goes_to: steps done
    from which training goes on, where replicas that this one met were elsewhere. is_over: other replicas have ended.
    """

    loss: float
    grad_norm: float
    count: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False
    update_ratio: float | None = None
    share: float = 1.0
    goes_to: int | None = None
    is_over: bool = False


class LateResult:
    """A result whose numbers are still on the device.

    The loop reads it when the next step is launched, so that the device always has work. All ranks read it there.

    Args:
        read: waits for the numbers.
    """

    def __init__(self, read: Callable[[], StepResult]):
        self.read = read


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: mean over the `count` that the task counts. metrics: the task's own by name; None: unknown."""

    loss: float
    count: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
