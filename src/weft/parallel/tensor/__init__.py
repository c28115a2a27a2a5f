"""Tensor and sequence parallelism by a layout."""
