"""Dtypes and placements of a model's tensors on ranks."""
