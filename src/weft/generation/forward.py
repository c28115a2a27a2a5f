"""One forward of a causal language model, with or without a cache. B rows, T tokens, V vocabulary."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.generation.row_cache import RowCache
from weft.models.decoder import Decoder


def next_logits(
    model: nn.Module, ids_BT: Tensor, positions_B1: Tensor | None = None, cache: RowCache | None = None
) -> Tensor:  # fmt: skip
    """Return the logits of the token after each row, (B, V).

    Args:
        model: a Decoder or a causal language model of transformers.
        ids_BT: whole texts if the cache is empty or None, else one new token of each row.
        positions_B1: positions of the new tokens; None for whole texts.
        cache: the rows' earlier tokens; the new ones are appended. The caller then calls `started` or `advanced`.

    Raises:
        ModelError: if the model takes no cache.
    """
    if positions_B1 is None:
        positions_B1 = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None].expand(ids_BT.shape[0], -1)
    if isinstance(model, Decoder):
        own: Any = cache.cache if cache is not None else None
        return model(ids_BT, positions_B1, cache=own, logits_to_keep=1)[:, -1]
    takes = _arguments(model)
    given: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        name = "cache" if "cache" in takes else "past_key_values"
        if name not in takes:
            raise ModelError(
                f"generation with {type(model).__name__}: its forward takes no cache. Generate with transformers."
            )
        given[name] = cache.cache
        if cache.has_keys:
            given["attention_mask"] = cache.mask(ids_BT.device) if cache.num_columns else torch.ones_like(ids_BT)
    if "position_ids" in takes:
        given["position_ids"] = positions_B1
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = 1
    return model(input_ids=ids_BT, **given).logits[:, -1]


#: Names of the arguments of models' forwards. Reading a signature takes longer than a small layer.
_known = weakref.WeakKeyDictionary[nn.Module, frozenset[str]]()


def _arguments(model: nn.Module) -> frozenset[str]:
    if model not in _known:
        _known[model] = frozenset(inspect.signature(model.forward).parameters)
    return _known[model]
