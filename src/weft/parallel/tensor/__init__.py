"""Tensor and sequence parallelism: each rank keeps its part of large matrices, and of the tokens between them."""

from __future__ import annotations

from weft.parallel.tensor.cut_linear import SharedLayer
from weft.parallel.tensor.cut_tensors import check_whole_model, cut_tensors, fuse_whole_head
from weft.parallel.tensor.head import HeadLogProbs, HeadLoss, expect_labels
from weft.parallel.tensor.head_loss import token_loss
from weft.parallel.tensor.read_layout import check_layout, expect_used

__all__ = [
    "HeadLogProbs",
    "HeadLoss",
    "SharedLayer",
    "check_layout",
    "check_whole_model",
    "cut_tensors",
    "expect_labels",
    "expect_used",
    "fuse_whole_head",
    "token_loss",
]
