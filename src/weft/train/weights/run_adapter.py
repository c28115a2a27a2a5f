"""The config's adapter on a task's model, and its size for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from weft.config.run_config import RunConfig
from weft.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.planner.space.trained_part import AdapterSize

Model = TypeVar("Model", bound="nn.Module")


def with_adapter(model: Model, config: RunConfig) -> Model:
    """Add the config's adapter, if any, to a task's model in place, and return the model.

    Raises:
        ConfigError: for targets that match no layer, or a layer that does not support adapters.
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


def adapter_size(shapes: nn.Module, config: RunConfig, num_layers: int) -> AdapterSize | None:
    """Return the size of the config's adapter for the model's layers, or None without an adapter.

    Args:
        shapes: the task's model on the meta device. The adapter is added to it.
        config: the run's config.
        num_layers: number of layers in the planner's description, over which sizes are averaged.

    Raises:
        ConfigError: as in `with_adapter`.
    """
    from weft.models.adapters import adapted
    from weft.planner.space.trained_part import AdapterSize

    record = adapted(with_adapter(shapes, config))
    if record is None:
        return None
    pairs = [(shapes.get_parameter(f"{path}.lora_A"), shapes.get_parameter(f"{path}.lora_B")) for path in record.layers]
    chosen = [(float(a.shape[1]), float(b.shape[0])) for a, b in pairs]
    frozen = [(float(width), float(_weight(shapes, path).shape[0])) for path, width in record.packed.items()]
    return AdapterSize.of_widths(record.kind.rank, num_layers, chosen, record.base, frozen)


def _weight(model: nn.Module, path: str) -> torch.Tensor:
    from torch import Tensor

    weight = model.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    return weight


# Batches of indexed samples: the order is a pure function of (seed, epoch, index).
