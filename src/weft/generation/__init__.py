"""Generating text with a model under a plan."""
