"""A key-value cache of rows that start at different columns, join later and leave earlier.

All rows end at the same column, so a new token is one column for all. A row that joins is padded on its left, or the
others are. Supports the caches of transformers and of Weft's decoders, by the class of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.decoder import Decoder
from weft.models.kv_cache import Cache, LayerCache


class RowCache:
    """Cache of a batch of rows.

    Args:
        model: a Decoder, or a model of transformers.
        alone: True if the cache never has more than one row.

    Attributes:
        cache: argument of the model: a `Cache`, or a DynamicCache of transformers.
        starts: the column of each row's first token.
        num_columns: number of columns, and the column of the next token.

    Raises:
        ModelError: if a layer's cache is of another class.
    """

    def __init__(self, model: nn.Module, *, alone: bool = False):
        self.cache: Any = _decoder_cache(model, alone) if isinstance(model, Decoder) else _transformers_cache(model)
        self.starts: list[int] = []
        self.num_columns = 0

    @property
    def has_keys(self) -> bool:
        """True if some layer keeps keys, so that padding must be masked. States of fixed size have no padding."""
        return any(hasattr(layer, "keys") for layer in self.cache.layers)

    def started(self, num_rows: int, num_tokens: int) -> None:
        """Note that `num_rows` rows of `num_tokens` tokens each were computed into the empty cache."""
        self.starts, self.num_columns = [0] * num_rows, num_tokens
        self._set_lengths()

    def advanced(self) -> None:
        """Note that one token was added to each row."""
        self.num_columns += 1
        self._set_lengths()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, and drop columns that none of them uses."""
        self.starts = [self.starts[row] for row in rows]
        unused = min(self.starts, default=0)
        self.starts = [start - unused for start in self.starts]
        self.num_columns -= unused
        for layer in self.cache.layers:
            _keep(layer, rows, unused)
        self._set_lengths()

    def join(self, others: Sequence[RowCache]) -> None:
        """Append the rows of other caches of the same model. They must not be used afterwards."""
        every = (self, *others)
        width = max(one.num_columns for one in every)
        for one in every:
            added = width - one.num_columns
            one.starts = [start + added for start in one.starts]
            one.num_columns = width
            for layer in one.cache.layers if added else ():
                _pad(layer, added)
        for layers in zip(*(one.cache.layers for one in every), strict=True):
            _join(layers)
        self.starts = [start for one in every for start in one.starts]
        self._set_lengths()

    def mask(self, device: torch.device) -> Tensor:
        """Return 1 for tokens and 0 for padding, (B, columns + 1): for the next token of each row."""
        columns = torch.arange(self.num_columns + 1, device=device)
        return (columns >= torch.tensor(self.starts, device=device)[:, None]).long()

    def _set_lengths(self) -> None:
        """Set values in the cache: first columns, and lengths of blocks on other pipeline ranks."""
        if isinstance(self.cache, Cache):
            self.cache.starts_B = torch.tensor(self.starts) if any(self.starts) else None
        layers: Sequence[Any] = self.cache.layers
        for layer in layers:
            if isinstance(layer, LayerCache):
                layer.num_elsewhere = self.num_columns
                continue
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = self.num_columns
            elif getattr(layer, "keys", 0) is None:  # another rank has the keys of this layer
                layer.get_seq_length = lambda: self.num_columns
            states: dict[Any, Tensor | None] = getattr(layer, "conv_states", {})
            if states and all(state is None for state in states.values()):  # likewise
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _decoder_cache(model: Decoder, alone: bool) -> Cache:
    if model.spec.capacity_factor and not alone:
        raise ModelError(
            f"model.capacity_factor={model.spec.capacity_factor}: its routers drop tokens depending on the other texts "
            "of a batch, so a text would depend on them. Generate one prompt at a time, or train without a capacity."
        )
    return Cache(model.spec.num_layers)


def _transformers_cache(model: nn.Module) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(LayerCache, DynamicLayer):
        """transformers' layer of full attention, without a copy of all keys for each token."""

        def __init__(self):
            DynamicLayer.__init__(self)
            LayerCache.__init__(self)

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.is_initialized, self.device = True, key_states.device
            return self.append(key_states, value_states)

        def get_seq_length(self, *args: Any) -> int:
            return self.num_tokens

    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise ModelError(
            f"generation with {type(model).__name__}: its layers attend within chunks, which rows of different "
            "lengths do not share. Generate one prompt at a time with transformers."
        )
    cache = DynamicCache(config=text)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    _expect_supported(model, cache.layers)
    return cache


def _expect_supported(model: nn.Module, layers: Sequence[Any]) -> None:
    for layer in layers:
        if not isinstance(layer, LayerCache) and type(layer).__name__ not in _SUPPORTED:
            raise ModelError(
                f"generation with {type(model).__name__}: its cache has a {type(layer).__name__}, which Weft does not "
                "know how to divide into rows. Generate with transformers."
            )


#: Classes of transformers that `_keep`, `_pad` and `_join` support.
_SUPPORTED = frozenset(
    {"DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
     "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer"}
)  # fmt: skip
#: Attributes of layers that hold states of fixed size, one dict of (B, ...) tensors each.
_STATES = ("conv_states", "recurrent_states")


def _keep(layer: Any, rows: Sequence[int], unused: int) -> None:
    if getattr(layer, "keys", None) is not None:
        index = torch.tensor(rows, device=layer.keys.device)
        layer.keys, layer.values = (_without_left(layer, x, unused)[index] for x in (layer.keys, layer.values))
    for states in (getattr(layer, name, {}) for name in _STATES):
        for key, state in states.items():
            if state is not None:
                states[key] = state[torch.tensor(rows, device=state.device)]


def _without_left(layer: Any, x_BKSC: Tensor, unused: int) -> Tensor:
    """Return keys or values without the first columns of the batch. A sliding window may have dropped them already."""
    if not hasattr(layer, "cumulative_length"):
        return x_BKSC[:, :, unused:]
    return x_BKSC[:, :, max(0, x_BKSC.shape[2] - (layer.cumulative_length - unused)) :]


def _pad(layer: Any, added: int) -> None:
    if getattr(layer, "keys", None) is None:
        return
    if hasattr(layer, "cumulative_length"):
        added = min(layer.cumulative_length + added, layer.sliding_window - 1) - layer.keys.shape[2]
    layer.keys, layer.values = (F.pad(x, (0, 0, added, 0)) for x in (layer.keys, layer.values))


def _join(layers: Sequence[Any]) -> None:
    """Append the rows of the other layers to the first."""
    first = layers[0]
    if getattr(first, "keys", None) is not None:
        first.keys, first.values = (torch.cat([getattr(one, name) for one in layers]) for name in ("keys", "values"))
    for name in _STATES:
        states: dict[Any, Tensor | None] = getattr(first, name, {})
        for key, state in states.items():
            if state is not None:
                states[key] = torch.cat([getattr(one, name)[key] for one in layers])
