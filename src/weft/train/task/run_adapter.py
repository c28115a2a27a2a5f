"""The adapter that a config asks for, on a task's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from weft.errors import ConfigError, ModelError, Problem
from weft.spec import RunConfig

if TYPE_CHECKING:
    from torch import nn

Model = TypeVar("Model", bound="nn.Module")


def with_adapter(model: Model, config: RunConfig) -> Model:
    """Add the adapter of the config's section to a task's model, in place, where it has one; the same model.

    Raises:
        ConfigError: for targets that fit no layer of it, or one that takes no adapter.
    """
    section = config.adapter
    if not section.rank:
        return model
    from weft.models.adapters import add_adapter

    settings = {"targets": section.targets, "dropout": section.dropout, "kind": section.kind, "base": section.base}
    try:
        add_adapter(model, rank=section.rank, alpha=section.alpha, seed=config.seed, **settings)
    except ModelError as error:
        named = next((key for key in ("targets", "base") if str(error).startswith(f"{key}=")), None)
        key = f"adapter.{named or 'rank'}"
        said = f"adapter.{error}" if named else f"{key}={section.rank}: {error}"
        raise ConfigError([Problem(key, said)]) from error
    return model
