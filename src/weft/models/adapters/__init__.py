"""Low-rank adapters on the linear layers of any model: LoRA, rsLoRA and DoRA in plain PyTorch."""

from __future__ import annotations

from weft.models.adapters.adapted_linear import AdaptedLinear, Alone, without_adapter
from weft.models.adapters.adapter_kind import Adapted, AdapterKind, adapted
from weft.models.adapters.adding import adapt_layers, add_adapter
from weft.models.adapters.base_format import BASE_FORMATS, BaseFormat
from weft.models.adapters.merge import merge_adapter, merged_tensors, merged_weight
from weft.models.adapters.peft_files import load_adapter, save_adapter, write_adapter

__all__ = [
    "Adapted",
    "AdaptedLinear",
    "BASE_FORMATS",
    "BaseFormat",
    "AdapterKind",
    "Alone",
    "adapt_layers",
    "adapted",
    "add_adapter",
    "load_adapter",
    "merge_adapter",
    "merged_tensors",
    "merged_weight",
    "save_adapter",
    "without_adapter",
    "write_adapter",
]
