"""Parallel execution applied from outside to plain modules."""

# First: what finds layouts and what cuts by them load each other's files, and this order can.
import weft.parallel.tensor  # isort: skip  # noqa: F401
from weft.parallel.expert import ExpertBalance
from weft.parallel.parallelize import parallelize
from weft.parallel.placement import DataParallel, Precision, data_parallel

__all__ = ["DataParallel", "ExpertBalance", "Precision", "data_parallel", "parallelize"]
