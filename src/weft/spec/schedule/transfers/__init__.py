"""What travels between the ranks of a pipeline, and when each sends and receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Key",
    "Transfer",
    "arrived_by",
    "flows",
    "receiving_early",
    "with_transfers",
]

if TYPE_CHECKING:
    from weft.spec.schedule.transfers.transfers import (
        Key,
        Transfer,
        arrived_by,
        flows,
        receiving_early,
        with_transfers,
    )

__getattr__ = loads(
    __name__,
    {
        "Key": ".transfers",
        "Transfer": ".transfers",
        "arrived_by": ".transfers",
        "flows": ".transfers",
        "receiving_early": ".transfers",
        "with_transfers": ".transfers",
    },
)
