"""The adapter that a config asks for, on a task's model, and its size for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from weft.errors import ConfigError, ModelError, Problem
from weft.spec import RunConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.planner.space import AdapterSize

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


def adapter_size(shapes: nn.Module, config: RunConfig, num_layers: int) -> AdapterSize | None:
    """Return the size of the adapter that the config asks for, by the model's own layers; None where it asks for none.

    Args:
        shapes: the task's model on the meta device. It gets the adapter.
        config: of the run.
        num_layers: that the planner counts in it, over which the mean is taken.

    Raises:
        ConfigError: as `with_adapter` raises it.
    """
    from weft.models.adapters import adapted
    from weft.planner.space import AdapterSize

    record = adapted(with_adapter(shapes, config))
    if record is None:
        return None
    pairs = [(shapes.get_parameter(f"{path}.lora_A"), shapes.get_parameter(f"{path}.lora_B")) for path in record.layers]
    chosen = [(float(a.shape[1]), float(b.shape[0])) for a, b in pairs]
    frozen = [(float(width), float(_weight(shapes, path).shape[0])) for path, width in record.packed.items()]
    return AdapterSize.of_widths(record.kind.rank, num_layers, chosen, record.base, frozen)


def _weight(model: nn.Module, path: str) -> torch.Tensor:
    """That of a layer, packed or not."""
    from torch import Tensor

    weight = model.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    return weight
