"""Kinds of training: each is a `Task`. The decoder on text is the first."""
