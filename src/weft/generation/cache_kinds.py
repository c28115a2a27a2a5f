"""What the layers of a Hugging Face model keep for each text that is generated, for the planner."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.generation.row_cache import RowCache
from weft.models.inspect import hugging_face
from weft.models.inspect.dry_run import SHORTEST, call_without_numbers
from weft.planner.cost.generation import CacheKind


def folder_caches(folder: Path) -> tuple[CacheKind, ...]:
    """Return the kinds of caches of a folder's causal language model, from a forward on the meta device.

    Raises:
        ModelError: if the folder's model is of another kind, has an unknown cache, or cannot run on the meta device.
    """
    with torch.device("meta"):
        model = hugging_face.causal_model(hugging_face.load_model_config(folder))
    cache = RowCache(model)
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, SHORTEST, dtype=torch.long, device="meta"), "use_cache": True}
    inputs[hugging_face.cache_name(model)] = cache.cache
    call_without_numbers(model, inputs, contextlib.nullcontext(), torch.bfloat16)
    found = Counter(kind for kind in map(_kind, cache.cache.layers) if kind.width or kind.fixed or kind.fixed_fp32)
    return tuple(replace(kind, layers=number) for kind, number in found.items())


def _kind(layer: Any) -> CacheKind:
    keys: Any = getattr(layer, "keys", None)
    states: list[Any] = [
        state for name in ("conv_states", "recurrent_states") for state in getattr(layer, name, {}).values()
    ]
    wide = sum(state.numel() for state in states if state is not None and state.dtype == torch.float32)
    narrow = sum(state.numel() for state in states if state is not None) - wide
    if keys is None:
        return CacheKind(layers=1, fixed=narrow, fixed_fp32=wide)
    window = int(getattr(layer, "sliding_window", None) or 0)
    width, heads = keys.shape[3] + layer.values.shape[3], keys.shape[1]
    return CacheKind(layers=1, heads=heads, width=width, window=window, fixed=narrow, fixed_fp32=wide)
