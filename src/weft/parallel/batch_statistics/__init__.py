"""What is taken over the samples at hand: losses that are means, and the statistics of batch norm."""

from __future__ import annotations

from weft.parallel.batch_statistics.grouped_norm import group_norms
from weft.parallel.batch_statistics.local_means import (
    TrainMode,
    count_of_hugging_face,
    frequency_refusal,
    global_mean,
    is_hugging_face_output,
    sum_of_hugging_face,
    trust_loss,
    watch_local_means,
)
from weft.parallel.batch_statistics.norm_groups import norm_groups_of
from weft.parallel.batch_statistics.sample_groups import SampleGroups

__all__ = [
    "SampleGroups",
    "TrainMode",
    "count_of_hugging_face",
    "frequency_refusal",
    "global_mean",
    "group_norms",
    "is_hugging_face_output",
    "norm_groups_of",
    "sum_of_hugging_face",
    "trust_loss",
    "watch_local_means",
]
