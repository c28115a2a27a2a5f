"""Parallel execution applied from outside to plain modules."""

# First: what finds layouts and what cuts by them load each other's files, and this order can.
import weft.parallel.tensor  # isort: skip  # noqa: F401
from weft.parallel.batch_statistics import (
    TrainMode,
    global_mean,
    is_hugging_face_output,
    norm_groups_of,
    sum_of_hugging_face,
    trust_loss,
)
from weft.parallel.dropout import drops_of
from weft.parallel.expert import ExpertBalance
from weft.parallel.local_tensors import OriginalParameters, Precision
from weft.parallel.parallelize import parallelize
from weft.parallel.placement import DataParallel, data_parallel

__all__ = [
    "DataParallel",
    "ExpertBalance",
    "OriginalParameters",
    "Precision",
    "TrainMode",
    "data_parallel",
    "drops_of",
    "global_mean",
    "is_hugging_face_output",
    "norm_groups_of",
    "parallelize",
    "sum_of_hugging_face",
    "trust_loss",
]
