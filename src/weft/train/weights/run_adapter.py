"""The config's adapter on a task's model, and its size for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weft.checkpoint.manifest import TensorEntry
from weft.checkpoint.read import Part
from weft.checkpoint.read_tensors import copy_part
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, ConfigError, ModelError, Problem

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.planner.space.trained_part import AdapterSize

Model = TypeVar("Model", bound="nn.Module")


def with_adapter(model: Model, config: RunConfig, base: Path | None = None) -> Model:
    """Add the config's adapter, if any, to a task's model in place, and return the model.

    base: folder of the run's copy of model.path; None for the one in the config's run folder.

    Raises:
        ConfigError: if targets match no layer or one that does not support adapters, or tokens are unknown.
    """
    section = config.adapter
    if not section.rank:
        return model
    from weft.models.adapters import add_adapter

    settings = {"targets": section.targets, "dropout": section.dropout, "kind": section.kind, "base": section.base}
    try:
        tokens, saved = _trained_tokens(model, config, base), section.modules_to_save
        add_adapter(
            model, rank=section.rank, alpha=section.alpha, modules_to_save=saved, trainable_tokens=tokens,
            seed=config.seed, **settings,
        )  # fmt: skip
    except ModelError as error:
        keys = ("targets", "base", "modules_to_save", "trainable_tokens")
        named = next((key for key in keys if str(error).startswith(f"{key}=")), None)
        key = f"adapter.{named or 'rank'}"
        said = f"adapter.{error}" if named else f"{key}={section.rank}: {error}"
        raise ConfigError([Problem(key, said)]) from error
    return model


def started_values(model: nn.Module, config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of `adapter.start` by name, or {} if it is not set.

    model: the task's model with the config's adapter, before `parallelize`.

    Raises:
        ConfigError: if the folder has no adapter in peft's format, or another one than the config's.
    """
    start = config.adapter.start
    if not start:
        return {}
    from weft.models.peft_files import adapter_values

    try:
        return adapter_values(model, Path(start).expanduser())
    except CheckpointError as error:
        raise ConfigError([Problem("adapter.start", f"adapter.start={start}: {error}")]) from error


def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Set tensors of a parallelized model, such as an adapter's, from full tensors by name. All ranks call it."""
    if not values:
        return
    from weft.parallel.state.gradients import data_parallel

    engine = data_parallel(model)
    source = _Values(values)
    for one in engine.model_slices():
        if one.name in values:
            one.fill(source)
    engine.publish()


class _Values:
    """A `StateSource` of full tensors in memory."""

    def __init__(self, values: Mapping[str, torch.Tensor]):
        self._values = {name: tensor.double().contiguous().numpy() for name, tensor in values.items()}
        self.entries = {name: TensorEntry("", "F64", array.shape) for name, array in self._values.items()}

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part from index `start` on."""
        copy_part(self._values[name], part, start, out)


def _trained_tokens(model: nn.Module, config: RunConfig, base: Path | None) -> dict[str, list[int]] | list[int]:
    """Return the config's trained tokens as the argument `trainable_tokens` of `add_adapter`.

    The added tokens are trained in the input embedding and in the output layer, unless modules_to_save trains these.
    Raises ModelError if a token is unknown, or if the model is not from model.path.
    """
    from weft.hub import local_folder
    from weft.models.inspect import layers
    from weft.models.token_rows import saved_modules
    from weft.train.folder import run_folder
    from weft.train.weights.added_rows import entries_of
    from weft.train.weights.decoder_files import base_of

    asked, added = config.adapter.trainable_tokens, config.tokenizer.add_tokens
    tokens = added if asked == "added" else asked
    if tokens and not config.model.path:
        raise ModelError(f"trainable_tokens={tokens[0]}: only a model of model.path has such tokens. Set model.path.")
    known: dict[str | int, int] = {token: token for token in tokens if isinstance(token, int)}
    if len(known) < len(set(tokens)):
        base, path = base or base_of(run_folder(config)), local_folder(config.model.path)
        known |= entries_of(path, added) if path.is_dir() else entries_of(base)
    if unknown := [token for token in tokens if token not in known]:
        rule = "the tokenizer has no such token. Add it with tokenizer.add_tokens, or leave it out"
        raise ModelError(f"trainable_tokens={unknown[0]}: {rule}.")
    ids = [known[token] for token in tokens]
    if asked != "added":
        return ids
    saved = [*saved_modules(model, config.adapter.modules_to_save)]
    tables = (layers.input_embeddings(model), layers.find_lm_head(model))
    paths = [path for path, module in model.named_modules() if any(module is table for table in tables)]
    return {path: ids for path in paths if not any(f"{path}.".startswith(f"{one}.") for one in saved)}


def adapter_size(shapes: nn.Module, config: RunConfig, num_layers: int) -> AdapterSize | None:
    """Return the size of the config's adapter on a model, or None if the config has no adapter.

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
    for path in record.experts:
        a, b = (shapes.get_parameter(f"{path}_lora_{name}") for name in "AB")
        chosen.append((float(a.shape[0] * a.shape[2]), float(b.shape[0] * b.shape[1])))
    frozen = [(float(width), float(_weight(shapes, path).shape[0])) for path, width in record.packed.items()]
    size = AdapterSize.of_widths(record.kind.rank, num_layers, chosen, record.base, frozen)
    trained = [param.numel() for param in shapes.parameters() if param.requires_grad]
    return replace(size, more=max(sum(trained) / num_layers - size.params, 0.0))


def _weight(model: nn.Module, path: str) -> torch.Tensor:
    from torch import Tensor

    weight = model.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    return weight
