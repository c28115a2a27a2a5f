"""Adapters merged into the weights beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.adapters.adapted_linear import AdaptedLinear
from weft.models.adapters.adapter_kind import ADAPTER_PARAMS, Adapted, adapted, note_adapted
from weft.models.adapters.base_format import BASE_FORMATS
from weft.models.adapters.packed_linear import leave_packed, unpack_layer
from weft.structure import layers, revert


def merge_adapter(model: nn.Module) -> nn.Module:
    """Add each adapter to the weight beside it, in place; the layers are then what they were before `add_adapter`.

    Weights that are kept as bytes become the numbers that these stand for: the adapter was trained beside those.
    Of a parallelized model merge the whole tensors with `merged_tensors`. All parameters stay frozen.

    Returns:
        The same model.

    Raises:
        ModelError: where the model has no adapter, or is parallelized.
    """
    record, found = _expected(model), dict[str, AdaptedLinear]()
    for path in record.layers:
        layer = model.get_submodule(path)
        # The new class stands on AdaptedLinear and the layer's own: whoever came later stands in front of both.
        if type(layer).__bases__[0] is not AdaptedLinear:
            raise ModelError(
                f"model: {path} was changed after add_adapter, such as by parallelize. Merge the whole tensors: "
                "merged_tensors(model, run.full_state_dict(model))."
            )
        assert isinstance(layer, AdaptedLinear)
        found[path] = layer
    for path in record.packed:
        unpack_layer(model.get_submodule(path))
    for path, layer in found.items():
        weight = layers.stored_weight(layer)
        own = {name: getattr(layer, name) for name in ADAPTER_PARAMS if getattr(layer, name) is not None}
        with torch.no_grad():
            weight.copy_(merged_weight(record, path, weight, own))
        for name in (*ADAPTER_PARAMS, "lora_dropout", "_weft_adapter", "_weft_whole", "_weft_is_on"):
            delattr(layer, name)
        revert(layer, AdaptedLinear)
    for path in record.packed:
        leave_packed(model.get_submodule(path))
    note_adapted(model, None)
    return model


def merged_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors of a model with its adapters merged and left out.

    Args:
        model: which layers have adapters; parallelized or not, of any device.
        tensors: of the whole model by name, such as `run.full_state_dict(model)` gives; they stay as they are.

    Raises:
        ModelError: where the model has no adapter.
    """
    record, merged = _expected(model), dict(tensors)
    own: dict[str, dict[str, Tensor]] = {}
    for path, name in record.params():
        own.setdefault(path, {})[name] = merged.pop(f"{path}.{name}")
    for path, width in record.packed.items():
        dtype = own[path]["lora_A"].dtype if path in own else torch.float32
        merged[f"{path}.weight"] = BASE_FORMATS[record.base].unpack(tensors[f"{path}.weight"], width, dtype)
    for path, parts in own.items():
        merged[f"{path}.weight"] = merged_weight(record, path, merged[f"{path}.weight"], parts)
    return merged


@torch.no_grad()
def merged_weight(record: Adapted, path: str, stored: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's weight with its adapter in it, in the weight's own format; computed in the adapter's.

    Args:
        record: what `adapted` gives of the model.
        path: of the layer.
        stored: its weight as it is stored: (F, D), or (D, F) where the layer keeps it transposed.
        own: the layer's parts of the adapter, by their names in it.
    """
    kind, is_transposed = record.kind, record.layers[path]
    weight = (stored.t() if is_transposed else stored).to(own["lora_A"].dtype)
    weight = weight + kind.scale * (own["lora_B"] @ own["lora_A"])
    if (magnitude := own.get("lora_magnitude")) is not None:
        weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=1))[:, None]
    return (weight.t() if is_transposed else weight).to(stored.dtype)


def _expected(model: nn.Module) -> Adapted:
    record = adapted(model)
    if record is None:
        raise ModelError(f"model of type {type(model).__name__}: it has no adapter to merge. Call add_adapter first.")
    return record
