"""Predictions compared with published runs."""
