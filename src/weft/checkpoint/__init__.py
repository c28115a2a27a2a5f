"""Checkpoints that cannot be half-written or silently corrupt: safetensors and JSON, committed last, digested.

The format is described in docs/reference/checkpoint_format.md.
"""

from weft.checkpoint.block import Block, Piece
from weft.checkpoint.load import (
    Checkpoint,
    Found,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    verify_checkpoint,
)
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.save import require_space, save_checkpoint

__all__ = [
    "Block",
    "Checkpoint",
    "Found",
    "Piece",
    "list_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "prune_checkpoints",
    "require_space",
    "save_checkpoint",
    "verify_checkpoint",
]
