"""Layers and hooks that parallelism techniques add to models."""
