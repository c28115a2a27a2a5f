"""Reads models and never changes them: blocks, layers, heads, what flows where."""
