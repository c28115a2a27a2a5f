"""What tracing found of a model: work, memory and parameters of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DividedBytes",
    "FORMAT",
    "Growth",
    "Limit",
    "Matmul",
    "TracedAttention",
    "TracedLayer",
    "TracedModel",
]

if TYPE_CHECKING:
    from weft.spec.traced.growth import DividedBytes, Growth, Matmul, TracedAttention
    from weft.spec.traced.traced_model import FORMAT, Limit, TracedLayer, TracedModel

__getattr__ = loads(
    __name__,
    {
        "DividedBytes": ".growth",
        "FORMAT": ".traced_model",
        "Growth": ".growth",
        "Limit": ".traced_model",
        "Matmul": ".growth",
        "TracedAttention": ".growth",
        "TracedLayer": ".traced_model",
        "TracedModel": ".traced_model",
    },
)
