"""Parallel execution applied from outside to plain modules."""

from weft.parallel.data import FlatGradients
from weft.parallel.parallelize import parallelize
from weft.parallel.precision import Precision

__all__ = ["FlatGradients", "Precision", "parallelize"]
