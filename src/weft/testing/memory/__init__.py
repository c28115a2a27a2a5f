"""Bytes that a step keeps and holds at its peak, counted exactly on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "LiveTensors",
    "peak_of_step",
    "saved_bytes",
]

if TYPE_CHECKING:
    from weft.testing.memory.live_tensors import LiveTensors
    from weft.testing.memory.saved_tensors import saved_bytes
    from weft.testing.memory.step_bytes import peak_of_step

__getattr__ = loads(
    __name__,
    {
        "LiveTensors": ".live_tensors",
        "peak_of_step": ".step_bytes",
        "saved_bytes": ".saved_tensors",
    },
)
