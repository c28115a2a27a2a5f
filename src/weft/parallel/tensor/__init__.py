"""Tensor and sequence parallelism: each rank keeps its part of large matrices, and of the tokens between them."""

from weft.parallel.tensor.cut_tensors import check_layout, check_whole_model, cut_tensors, fuse_whole_head
from weft.parallel.tensor.head import HeadLoss, expect_labels

__all__ = ["HeadLoss", "check_layout", "check_whole_model", "cut_tensors", "expect_labels", "fuse_whole_head"]
