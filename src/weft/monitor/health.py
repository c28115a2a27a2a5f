"""Stop a run before its weights are spoilt."""

from __future__ import annotations

import math

from weft.errors import TrainingHalted


class NonFiniteGuard:
    """Watches loss and gradient norm, and halts after more than `limit` bad steps in a row.

    limit: train.max_bad_steps; 0 halts at the first bad step.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._row: list[tuple[int, str]] = []

    @property
    def num_bad(self) -> int:
        """Bad steps in a row, up to the last one observed."""
        return len(self._row)

    @property
    def first_bad(self) -> int | None:
        """The first of them; None after a good step."""
        return self._row[0][0] if self._row else None

    def observe(self, step: int, loss: float, grad_norm: float, *, loss_scale: float | None = None) -> str | None:
        """Return why this step must not change the weights, or None when it may.

        Args:
            step: counts from 1.
            loss: of this step.
            grad_norm: of the whole gradient.
            loss_scale: of fp16. While it is above 1, a gradient that overflowed is the scaler's search for its scale,
                and does
                not count against the limit.

        Raises:
            TrainingHalted: beyond the limit, with a sentence that its catcher ends: where the command resumes.
        """
        reason = _reason(loss, grad_norm)
        if reason is None:
            self._row.clear()
            return None
        if math.isfinite(loss) and loss_scale is not None and loss_scale > 1:
            return f"{reason} at loss scale {loss_scale:g}"
        self._row.append((step, "gradient" if math.isfinite(loss) else "loss"))
        if len(self._row) > self.limit:
            raise TrainingHalted(self._sentence(reason))
        return reason

    def _sentence(self, reason: str) -> str:
        first, last = self._row[0][0], self._row[-1][0]
        count = len(self._row)
        kinds = {kind for _, kind in self._row}
        what = " or ".join(sorted(kinds, reverse=True))
        where = f"at step {first}" if count == 1 else f"at {count} steps in a row ({first} to {last})"
        if "loss" in kinds and first <= 1:
            advice = "No step was finite: check the data and the initial weights, or try precision=fp32"
        elif "loss" in kinds:
            advice = "Lower optimizer.lr or lengthen schedule.warmup_steps"
        else:
            advice = "Lower optimizer.lr or optimizer.max_grad_norm, or use bf16 or fp32 in place of fp16"
        return (
            f"train.max_bad_steps={self.limit}: the {what} was not finite {where}; the last: {reason}."
            f" {advice}, and run the command again"
        )


def _reason(loss: float, grad_norm: float) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"the gradient norm is {grad_norm}"
    return None
