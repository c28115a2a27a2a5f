"""What a model costs: its parameters, and its forward and backward kernel by kernel, found without numbers."""

from __future__ import annotations

from weft.structure.cost.describe import describe
from weft.structure.cost.growth import Outline, trace_model
from weft.structure.cost.kernel_recorder import is_worth_keeping

__all__ = [
    "Outline",
    "describe",
    "is_worth_keeping",
    "trace_model",
]
