"""A batch in memory that stays, into which others of the same shapes are copied."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from weft.data.batch import check_batch, hold_batches, map_tensors, parts_of, tensors_in

_PLAIN = (bool, int, float, str, bytes, type(None))


def shape_of(batch: Any) -> Hashable | None:
    """Return what two batches must have in common to be computed by the same kernels; None where that is not known.

    Shapes, strides and formats of tensors, their places in containers, and all that is neither tensor nor container.
    """
    if isinstance(batch, Tensor):
        holds_others = hasattr(type(batch), "__tensor_flatten__")
        if holds_others or batch.is_nested or batch.layout != torch.strided or batch.requires_grad:
            return None
        return tuple(batch.shape), batch.stride(), batch.dtype
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    parts = parts_of(batch)
    if parts is None:
        return None
    inner = tuple(shape_of(part) for part in parts)
    keys = tuple(batch) if isinstance(batch, dict) else ()
    return None if None in inner else (type(batch), keys, inner)


class FixedBatch:
    """The memory of one shape.

    Whoever would look at its values on the host leaves a check, which looks at each batch that comes. batch: as the
    model is given it.

    Args:
        like: a batch of that shape.
    """

    def __init__(self, like: Any):
        self.batch = map_tensors(_memory, like)
        self._tensors = list(tensors_in(self.batch))

    def fill(self, batch: Any) -> None:
        """Copy a batch of the same shape, on the same device, after its checks."""
        for mine, given in zip(self._tensors, tensors_in(batch), strict=True):
            check_batch(mine, given)
            mine.copy_(given)


def _memory(tensor: Tensor) -> Tensor:
    found = torch.empty_like(tensor)  # of other strides where elements share memory, or leave some out
    hold_batches(found)
    return found
