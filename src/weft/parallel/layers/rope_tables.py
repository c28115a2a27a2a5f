"""Choice of RoPE tables by document length, for transformers models that choose one table per batch.

With `rope_type=longrope` (Phi-3, Phi-4) transformers uses the long table for all rows of a batch if one row is longer
than `original_max_position_embeddings`. So a short row's output would depend on whether its batch contains a long row.
With `rope_type=dynamic` the table also depends on earlier batches.

B sequences, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.inspect import hugging_face


def track_row_lengths(model: nn.Module, cp: int) -> None:
    """Add hooks that make a transformers model with longrope choose its RoPE table for each document.

    Forwards with longer documents than the original table raise ModelError for dynamic RoPE, for cp > 1, and if each
    kind of layer has its own table and the batch has short documents too. Does nothing for models with other RoPE.
    cp: ranks that share a sequence.
    """
    if not hugging_face.is_hugging_face(model):
        return
    rotaries = [module for module in model.modules() if _kind(module) in ("longrope", "dynamic")]
    if not rotaries:
        return
    tables = _RowTables(model, rotaries, cp)
    model.register_forward_pre_hook(tables.before, with_kwargs=True)
    for rotary in rotaries:
        rotary.register_forward_hook(tables.after, with_kwargs=True)


def _kind(module: nn.Module) -> str:
    """Return the `rope_type` of a rotary embedding whose table depends on positions, or ""."""
    found = getattr(module, "rope_type", "")
    kinds = [*found.values()] if isinstance(found, Mapping) else [found]
    return next(
        (kind for name in ("dynamic", "longrope") for kind in kinds if isinstance(kind, str) and name in kind), ""
    )


class _RowTables:
    def __init__(self, model: Any, rotaries: list[nn.Module], cp: int):
        self._names = list(inspect.signature(model.forward).parameters)
        self._cp = cp
        self._is_dynamic = any(_kind(rotary) == "dynamic" for rotary in rotaries)
        self._is_mixed = any(isinstance(getattr(rotary, "rope_type", ""), Mapping) for rotary in rotaries)
        self._limit = min(_limit(rotary) for rotary in rotaries)
        self._is_long_BT: Tensor | None = None  # None: the same table for all tokens

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the tokens of documents that are longer than the limit, the length of the original table.

        If a row is longer, this raises ModelError for dynamic RoPE and for cp > 1. It also raises ModelError for short
        and long documents in a batch if each kind of layer has its own table.
        """
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        self._is_long_BT = None
        if not isinstance(tokens, Tensor) or (length := tokens.shape[1] * self._cp) <= self._limit:
            return
        if self._is_dynamic or self._cp > 1:
            kind = "dynamic" if self._is_dynamic else "longrope"
            why = "on the batches before" if self._is_dynamic else "on the positions of a rank"
            remedy = "a rope_type with one table, such as yarn" if self._is_dynamic else "cp=1"
            raise ModelError(
                f"rope_type={kind}: a sequence of {length} tokens is longer than {self._limit}, and the rotary table "
                f"of {type(model).__name__} would depend {why}. Use at most {self._limit} tokens, or {remedy}."
            )
        lengths_BT = _lengths(given)
        if lengths_BT is None or bool((is_long_BT := lengths_BT > self._limit).all()):
            return
        if self._is_mixed:
            raise ModelError(
                f"rope_type=longrope: {type(model).__name__} has a table for each kind of layer, and the batch has "
                f"rows below and above {self._limit} tokens. Put rows of one kind into a batch."
            )
        self._is_long_BT = is_long_BT

    def after(self, rotary: Any, args: Any, kwargs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Replace a rotary embedding's output for tokens of short documents with values of the short table."""
        if self._is_long_BT is None:
            return None
        with torch.no_grad():
            long = rotary.inv_freq.clone()
            rotary.inv_freq.copy_(rotary.original_inv_freq)
            short = inspect.unwrap(type(rotary).forward)(rotary, *args, **kwargs)
            rotary.inv_freq.copy_(long)
            is_long_BT1 = self._is_long_BT[..., None]
            return tuple(torch.where(is_long_BT1, one, other) for one, other in zip(output, short, strict=True))


def _limit(rotary: Any) -> int:
    """Return the number of tokens up to which a rotary embedding uses its original table."""
    if _kind(rotary) == "dynamic":
        return int(rotary.original_max_seq_len)
    found = rotary.config.rope_parameters
    tables = [found] if "rope_type" in found else [*found.values()]
    limits = [table["original_max_position_embeddings"] for table in tables if table["rope_type"] == "longrope"]
    return int(min(limits))


def _lengths(given: dict[str, Any]) -> Tensor | None:
    """Return the length of each token's document, (B, T) or (B, 1), or None if each row is one full document."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        document_BT = (positions == 0).long().cumsum(1)
        most = positions.new_zeros(len(positions), positions.shape[1] + 1)
        most = most.scatter_reduce(1, document_BT, positions, "amax")
        return most.gather(1, document_BT) + 1
    return mask.sum(1, keepdim=True) if isinstance(mask, Tensor) and mask.ndim == 2 else None
