"""The planner's description of a task that gives none: its model, traced with its own samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.errors import ModelError
from weft.parallel.description import describe_by_tracing
from weft.planner.search import PlannedModel, read_model

if TYPE_CHECKING:
    from weft.train.task import Task


def describe_by_samples(task: Task) -> PlannedModel:
    """Trace the task's model on two of its samples. ModelError where it does not run without numbers."""
    samples = task.samples("train") or ()
    if len(samples) < 2:
        raise ModelError(f"task.name={task.config.task.name}: the planner looks at two samples. Give at least two.")
    batch = task.collate([samples[0], samples[1]])

    def example(step: int, size: int) -> Any:
        return tuple(batch) if isinstance(batch, list) else batch

    try:
        traced = describe_by_tracing(task.shapes(), example)
    except ModelError as error:
        raise ModelError(f"task.name={task.config.task.name}: {str(error).rstrip('.')}.") from error
    return replace(read_model(replace(traced, name=task.name())), config=task.config)
