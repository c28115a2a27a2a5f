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
    from weft.spec.traced.layer_terms import DividedBytes, Growth, Matmul, TracedAttention
    from weft.spec.traced.traced_model import FORMAT, Limit, TracedLayer, TracedModel

__getattr__ = loads(
    __name__,
    {
        "DividedBytes": ".layer_terms",
        "FORMAT": ".traced_model",
        "Growth": ".layer_terms",
        "Limit": ".traced_model",
        "Matmul": ".layer_terms",
        "TracedAttention": ".layer_terms",
        "TracedLayer": ".traced_model",
        "TracedModel": ".traced_model",
    },
)
