"""Comparison of predictions with published runs."""
