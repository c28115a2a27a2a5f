"""Models by `package.module:function`: importing and calling it, and what is said where that fails."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from weft.errors import ModelError
from weft.lazy import named_object
from weft.structure.dry_run import LoadedSamples, is_placed


def call_function(source: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model that a function gives, and what it gives beside it, a DataLoader as `LoadedSamples`.

    The working folder can be imported from.

    Raises:
        ModelError: where it cannot be imported or called, or gives no model.
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
    dataset = cast(Any, loader.dataset)
    if isinstance(dataset, IterableDataset) or not len(dataset):
        raise ModelError(
            f"model={source}: its loader's dataset has no samples that can be read by their number. "
            f"Return a DataLoader of a map-style dataset, or batch_fn(step, size)."
        )
    return LoadedSamples(loader)
