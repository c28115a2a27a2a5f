"""Distillation from the logits of a teacher, as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["DistillTask", "PretrainedDistillTask", "distilled_losses"]

if TYPE_CHECKING:
    from weft.train.tasks.distill.distill_task import DistillTask, PretrainedDistillTask
    from weft.train.tasks.distill.divergence import distilled_losses

__getattr__ = loads(
    __name__,
    {
        "DistillTask": ".distill_task",
        "PretrainedDistillTask": ".distill_task",
        "distilled_losses": ".divergence",
    },
)
