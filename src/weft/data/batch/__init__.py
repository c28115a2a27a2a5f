"""What a batch is made of: tensors, nested as collate functions like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "check_batch",
    "hold_batches",
    "host_values",
    "kept_generators",
    "leave_check",
    "map_tensors",
    "move_batch",
    "parts_of",
    "remember_host",
    "seed_generators",
    "tensors_in",
    "with_parts",
]

if TYPE_CHECKING:
    from weft.data.batch.batches import map_tensors, move_batch, parts_of, tensors_in, with_parts
    from weft.data.batch.generators import kept_generators, seed_generators
    from weft.data.batch.on_host import check_batch, hold_batches, host_values, leave_check, remember_host

__getattr__ = loads(
    __name__,
    {
        "check_batch": ".on_host",
        "hold_batches": ".on_host",
        "host_values": ".on_host",
        "kept_generators": ".generators",
        "leave_check": ".on_host",
        "map_tensors": ".batches",
        "move_batch": ".batches",
        "parts_of": ".batches",
        "remember_host": ".on_host",
        "seed_generators": ".generators",
        "tensors_in": ".batches",
        "with_parts": ".batches",
    },
)
