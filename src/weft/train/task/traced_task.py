"""The planner's description of a task that gives none: its model, traced with its own samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.errors import ModelError
from weft.planner.search import PlannedModel, read_model
from weft.train.planned import describe_by_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from weft.spec import RunConfig
    from weft.train.task.share import MapDataset


def describe_by_samples(
    shapes: nn.Module, samples: MapDataset, collate: Callable[[list[Any]], Any], name: str, config: RunConfig
) -> PlannedModel:
    """Trace a task's model, given on the meta device, on a batch of two of its samples.

    name: of what is trained. Raises ModelError where the model does not run without numbers.
    """
    if len(samples) < 2:
        raise ModelError(f"task.name={config.task.name}: the planner looks at two samples. Give at least two.")
    batch = collate([samples[0], samples[1]])

    def example(step: int, size: int) -> Any:
        return tuple(batch) if isinstance(batch, list) else batch

    try:
        traced = describe_by_tracing(shapes, example)
    except ModelError as error:
        raise ModelError(f"task.name={config.task.name}: {str(error).rstrip('.')}.") from error
    return replace(read_model(replace(traced, name=name)), config=config)
