"""Models by `package.module:function`: importing and calling it, and what is said where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from weft.errors import ModelError
from weft.lazy import named_object
from weft.structure.dry_run import is_placed


class LoadedSamples:
    """The samples of a user's DataLoader in the order of its dataset, from its start again when it is at its end.

    It may be called as a batch_fn(step, size).
    """

    def __init__(self, loader: DataLoader[Any]):
        self._dataset: Any = loader.dataset
        #: Makes a batch of a list of samples.
        self.collate = cast(Callable[[list[Any]], Any], loader.collate_fn)  # pyright: ignore[reportUnknownMemberType]

    def samples(self, step: int, size: int) -> list[Any]:
        """Those of one step."""
        return [self._dataset[number % len(self._dataset)] for number in range(step * size, (step + 1) * size)]

    def __call__(self, step: int, size: int) -> Any:
        return self.collate(self.samples(step, size))


def call_function(source: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model that a function gives, and what it gives beside it, a DataLoader as `LoadedSamples`.

    The working folder can be imported from.

    Raises ModelError where it cannot be imported or called, or gives no model.
    """
    try:
        function = named_object(source)
    except Exception as error:  # code of the user's may raise anything
        rule = f"it cannot be imported ({error})"
        raise ModelError(
            f"model={source}: {rule}. Write package.module:function, importable from this folder."
        ) from None
    if not callable(function):
        rule = f"it is of type {type(function).__name__} and cannot be called"
        raise ModelError(f"model={source}: {rule}. Name a function without arguments that returns a model.")
    try:
        made = function()
    except Exception as error:
        rule = f"it raised {type(error).__name__} ({error})"
        raise ModelError(f"model={source}: {rule}. Call it in Python without arguments, to see where.") from error
    model, *rest = made if is_placed(made) else (made,)
    if not isinstance(model, nn.Module):
        rule = f"it returned {type(model).__name__}, not an nn.Module"
        raise ModelError(f"model={source}: {rule}. Return a model, or it and an example or a batch_fn.")
    if rest and isinstance(rest[0], DataLoader):
        rest[0] = _loaded(source, cast(DataLoader[Any], rest[0]))
    return model, tuple(rest)


def _loaded(source: str, loader: DataLoader[Any]) -> LoadedSamples:
    if isinstance(loader.dataset, IterableDataset) or not len(loader.dataset):  # pyright: ignore[reportArgumentType]
        raise ModelError(
            f"model={source}: its loader's dataset has no samples that can be read by their number. "
            f"Return a DataLoader of a map-style dataset, or batch_fn(step, size)."
        )
    return LoadedSamples(loader)
