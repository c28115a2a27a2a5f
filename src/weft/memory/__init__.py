"""What is kept in memory between forward and backward, and where."""

from weft.memory.recompute import Recompute, apply_recompute, recompute_of
from weft.structure.blocks import repeated_blocks

__all__ = ["Recompute", "apply_recompute", "recompute_of", "repeated_blocks"]
