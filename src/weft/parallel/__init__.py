"""Parallel execution applied from outside to plain modules."""

from weft.parallel.expert_balance import ExpertBalance
from weft.parallel.gradients import DataParallel, data_parallel
from weft.parallel.parallelize import parallelize
from weft.parallel.precision import Precision

__all__ = ["DataParallel", "ExpertBalance", "Precision", "data_parallel", "parallelize"]
