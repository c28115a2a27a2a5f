"""What is kept in memory between forward and backward, and where."""

from weft.memory.recompute import Recompute, apply_recompute, recompute_of

__all__ = ["Recompute", "apply_recompute", "recompute_of"]
