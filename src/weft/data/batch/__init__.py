"""What a batch is made of: tensors, nested as collate functions like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "map_tensors",
    "move_batch",
    "parts_of",
    "tensors_in",
    "with_parts",
]

if TYPE_CHECKING:
    from weft.data.batch.batches import map_tensors, move_batch, parts_of, tensors_in, with_parts

__getattr__ = loads(
    __name__,
    {
        "map_tensors": ".batches",
        "move_batch": ".batches",
        "parts_of": ".batches",
        "tensors_in": ".batches",
        "with_parts": ".batches",
    },
)
