"""The planner's description of a task that gives none: its model, traced with its own samples."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from weft.errors import ModelError, WeftError
from weft.planner.search import PlannedModel, read_model
from weft.train.task.description import describe_by_tracing
from weft.train.task.run_adapter import adapter_size

if TYPE_CHECKING:
    from torch import nn

    from weft.spec import RunConfig
    from weft.train.task.share import MapDataset

T = TypeVar("T")


class SampledTask(Protocol):
    """What tracing asks of a task."""

    config: RunConfig
    sample_unit: ClassVar[str]

    def name(self) -> str: ...
    def shapes(self) -> nn.Module: ...
    def samples(self, split: str) -> MapDataset | None: ...
    def collate(self, samples: list[Any]) -> Any: ...


def describe_by_samples(task: SampledTask) -> PlannedModel:
    """Trace a task's model on the meta device, on a batch of two of its samples.

    Args:
        task: whose model is traced.

    Raises:
        ModelError: where a method of the task fails, or the model does not run without numbers.
    """
    field = f"task.name={task.config.task.name}"
    samples = _call(task, "samples", lambda: task.samples("train")) or ()
    if len(samples) < 2:
        raise ModelError(f"{field}: it has {len(samples)} training samples, and tracing takes 2. Add some.")
    batch = _call(task, "collate", lambda: task.collate([samples[0], samples[1]]))
    shapes = _call(task, "build", task.shapes)

    def example(step: int, size: int) -> Any:
        return tuple(batch) if isinstance(batch, list) else batch

    try:
        traced = describe_by_tracing(shapes, example)
    except ModelError as error:
        raise ModelError(f"{field}: {str(error).rstrip('.')}.") from error
    adapter = None
    if task.config.adapter.rank:
        adapter = adapter_size(_call(task, "build", task.shapes), task.config, traced.num_layers)
    found = read_model(replace(traced, name=task.name()))
    return replace(found, config=task.config, sample_unit=task.sample_unit, counted_adapter=adapter)


def _call(task: SampledTask, method: str, call: Callable[[], T]) -> T:
    """What a method of the user's returns. ModelError, with the exception's own words, where it raises one."""
    try:
        return call()
    except WeftError:
        raise
    except Exception as error:  # code of the user's may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        own = inspect.getfile(type(task))
        frame = next((each for each in reversed(frames) if each.filename == own), frames[-1])
        raise ModelError(
            f"task.name={task.config.task.name}: {method} raised {type(error).__name__} at "
            f"{Path(frame.filename).name}:{frame.lineno} ({error}). Correct it; `weft train` prints the traceback."
        ) from error
