"""Formats and positions of a model's tensors on ranks."""
