"""Time and memory of plans whose ranks share the cores of one measured host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "host_layer_costs",
    "host_memory",
    "host_parts",
]

if TYPE_CHECKING:
    from weft.planner.measured.host.host_layer import host_layer_costs
    from weft.planner.measured.host.live_bytes import host_memory
    from weft.planner.measured.host.step_terms import host_parts

__getattr__ = loads(
    __name__,
    {
        "host_layer_costs": ".host_layer",
        "host_memory": ".live_bytes",
        "host_parts": ".step_terms",
    },
)
