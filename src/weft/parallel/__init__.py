"""Parallel execution applied from outside to plain modules."""

from weft.parallel.expert.expert_balance import ExpertBalance
from weft.parallel.parallelize import parallelize
from weft.parallel.placement.gradients import DataParallel, data_parallel
from weft.parallel.placement.precision import Precision

__all__ = ["DataParallel", "ExpertBalance", "Precision", "data_parallel", "parallelize"]
