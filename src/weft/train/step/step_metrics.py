"""What a step says of itself, on the host at once or when somebody looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from weft.optim import LossScale


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did, equal on all ranks.

    loss: mean over all tokens of the global batch, before the update. grad_norm: before clipping.
    skipped: why the weights were left as they were, or None. wants_stop: some rank asked to stop.
    update_ratio: norm of the update over the norm of the weights, in a step that measures it and is taken.

    On a GPU the first look at a number waits until the device has made it. The step before has passed by then, so a
    loop that shows the metrics of the step before never waits.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False
    update_ratio: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def moved(self, ratio: Callable[[], float | None] | None) -> StepMetrics:
        """Return the same with its update's ratio, where the step was taken. ratio: gives it; None: not measured."""
        return self if ratio is None or self.skipped is not None else replace(self, update_ratio=ratio())

    @classmethod
    def of_sums(cls, numbers: Sequence[float], nominal: float, scale: LossScale) -> StepMetrics:
        """Return the metrics of a step.

        Args:
            numbers: sum of losses, number of tokens, ranks that want to stop, ..., norm of the gradient as it lies.
            nominal: what the loss was divided by before backward.
            scale: as it was in this step.
        """
        loss_sum, num_tokens, stops, *_, norm = numbers
        loss = loss_sum / max(num_tokens, 1.0)
        grad_norm = norm * to_mean(nominal, num_tokens, scale)
        skipped = None
        if num_tokens == 0:
            skipped = "no trained token in the global batch"
        elif not math.isfinite(loss):
            skipped = f"loss is {loss}"
        elif not math.isfinite(grad_norm):
            skipped = f"gradient norm is {grad_norm}"
        shown = scale.factor() if scale.enabled else None
        return cls(loss, grad_norm, round(num_tokens), shown, skipped, stops > 0)


def to_mean(nominal: float, num_tokens: float, scale: LossScale) -> float:
    """Return what brings gradients, which hold sum / nominal * scale, to the mean over the tokens."""
    return nominal / (max(num_tokens, 1.0) * scale.factor())


class LateMetrics(StepMetrics):
    """Metrics whose numbers are on the device until somebody looks at one. read: waits for them."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], StepMetrics]):
        object.__setattr__(self, "_read", read)

    def __getattr__(self, name: str) -> Any:
        if name not in StepMetrics.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._read()
        for field in fields(StepMetrics):
            object.__setattr__(self, field.name, getattr(found, field.name))
        return getattr(found, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepMetrics, tuple(getattr(self, field.name) for field in fields(StepMetrics))


def power_of_two(number: int) -> float:
    """Return the power of two nearest below: multiplying by it loses no bit."""
    return 2.0 ** math.floor(math.log2(max(1, number)))
