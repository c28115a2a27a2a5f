"""Parallelism techniques, applied to a model from outside."""
