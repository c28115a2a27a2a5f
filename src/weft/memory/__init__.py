"""Recompute, offload, pinned memory and recorded graphs."""
