"""Parallel execution applied from outside to plain modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DataParallel",
    "ExpertBalance",
    "Precision",
    "TrainMode",
    "data_parallel",
    "drops_of",
    "global_mean",
    "is_hugging_face_output",
    "parallelize",
    "sum_of_hugging_face",
    "trust_loss",
]

if TYPE_CHECKING:
    from weft.parallel.dropout import drops_of
    from weft.parallel.expert import ExpertBalance
    from weft.parallel.local_means import (
        TrainMode,
        global_mean,
        is_hugging_face_output,
        sum_of_hugging_face,
        trust_loss,
    )
    from weft.parallel.local_tensors import Precision
    from weft.parallel.parallelize import parallelize
    from weft.parallel.placement import DataParallel, data_parallel

__getattr__ = loads(
    __name__,
    {
        "DataParallel": ".placement",
        "ExpertBalance": ".expert",
        "Precision": ".local_tensors",
        "TrainMode": ".local_means",
        "data_parallel": ".placement",
        "drops_of": ".dropout",
        "global_mean": ".local_means",
        "is_hugging_face_output": ".local_means",
        "parallelize": ".parallelize",
        "sum_of_hugging_face": ".local_means",
        "trust_loss": ".local_means",
    },
)
