"""Checkpoints that cannot be half-written or silently corrupt: safetensors and JSON, committed last, digested.

The format is described in docs/reference/checkpoint_format.md.
"""

from __future__ import annotations

from weft.checkpoint.all_ranks import Together
from weft.checkpoint.folders import folder_name, step_in_name
from weft.checkpoint.load import (
    Checkpoint,
    Found,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    verify_checkpoint,
)
from weft.checkpoint.prune import prune_checkpoints, set_aside, set_unfinished_aside
from weft.checkpoint.rank_files import SavedPiece, save_pieces
from weft.checkpoint.save import require_space, save_checkpoint

__all__ = [
    "Checkpoint",
    "Found",
    "SavedPiece",
    "Together",
    "folder_name",
    "list_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "prune_checkpoints",
    "require_space",
    "save_checkpoint",
    "save_pieces",
    "set_aside",
    "set_unfinished_aside",
    "step_in_name",
    "verify_checkpoint",
]
