"""Default positions of Hugging Face models for a sharded sequence.

Most models use the token's index. RoBERTa and related models start after the padding token's id and skip padding. OPT
and BioGPT count the tokens that the mask leaves visible. Both need the full sequence, so its tokens or its mask are
gathered, at a few bytes per token.

B sequences, T tokens of this rank, S tokens of the full sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.context.apply import Context
from weft.parallel.context.modes import full_sequence

#: RoBERTa's position counter in transformers: a method of the embeddings, in earlier versions a module-level function.
_COUNTS = "create_position_ids_from_input_ids"

#: Function from a rank's (tokens or their embeddings, mask, token indices) to positions, (B, T) or (1, T).
Positions = Callable[[Context, Tensor, Tensor | None, Tensor], Tensor]


def positions_of(model: nn.Module) -> Positions:
    """Return the function that computes this model's default positions."""
    for module in model.modules():
        count = getattr(module, _COUNTS, None) or getattr(sys.modules.get(type(module).__module__), _COUNTS, None)
        padding = getattr(module, "padding_idx", None)
        if count is not None and isinstance(padding, int) and _has_table(module):
            return _PastPadding(count, padding)
        if isinstance(module, nn.Embedding) and {"attention_mask", "position_ids"} <= _arguments(module):
            return _by_mask
    return _positions


def _has_table(module: nn.Module) -> bool:
    return isinstance(getattr(module, "position_embeddings", None), nn.Embedding)


def _arguments(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def _positions(context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
    del context, tokens, mask
    return places_T[None]


class _PastPadding:
    """Positions that start at padding_idx + 1. Padding has position padding_idx."""

    def __init__(self, count: Callable[[Tensor, int], Any], padding_idx: int):
        self._count, self._padding_idx = count, padding_idx
        self.first = padding_idx + 1

    def __call__(self, context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
        del mask
        if tokens.is_floating_point():  # embeddings do not show which tokens are padding
            return places_T[None] + self.first
        order = context.order(places_T.shape[0] * context.axis.size)
        return order.shard(self._count(full_sequence(tokens, context.axis, order), self._padding_idx))


def _by_mask(context: Context, tokens: Tensor, mask: Tensor | None, places_T: Tensor) -> Tensor:
    del tokens
    if mask is None:
        return places_T[None]
    order = context.order(places_T.shape[0] * context.axis.size)
    seen_BS = full_sequence(mask.to(torch.int64), context.axis, order)
    return order.shard(seen_BS.cumsum(1) * seen_BS - 1)
