"""Folders of pretrained weights as Hugging Face writes them, read slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Computed",
    "Joined",
    "JoinedTensors",
    "StoredWeights",
    "no_folder",
    "stored_weights",
    "under_model_names",
]

if TYPE_CHECKING:
    from weft.checkpoint.pretrained.conversions import under_model_names
    from weft.checkpoint.pretrained.joined_tensors import Computed, Joined, JoinedTensors
    from weft.checkpoint.pretrained.weights_folder import StoredWeights, no_folder, stored_weights

__getattr__ = loads(
    __name__,
    {
        "Computed": ".joined_tensors",
        "Joined": ".joined_tensors",
        "JoinedTensors": ".joined_tensors",
        "StoredWeights": ".weights_folder",
        "no_folder": ".weights_folder",
        "stored_weights": ".weights_folder",
        "under_model_names": ".conversions",
    },
)
