"""Tensor and sequence parallel: layers cut by a layout, and the head that gives the loss."""
