"""What is kept in memory between forward and backward, and where."""

from weft.memory.blocks import repeated_blocks
from weft.memory.recompute import Recompute, apply_recompute, recompute_of

__all__ = ["Recompute", "apply_recompute", "recompute_of", "repeated_blocks"]
