"""What a model's forward and backward cost, kernel by kernel, found without numbers."""

from weft.structure.cost.growth import Outline, trace_model
from weft.structure.cost.record import is_worth_keeping

__all__ = ["Outline", "is_worth_keeping", "trace_model"]
