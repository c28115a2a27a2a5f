"""Where checkpoints are kept: a folder, a prefix of an object store, or memory. All else asks a `Target`."""

from __future__ import annotations

from weft.checkpoint.targets.copy_files import copies_at
from weft.checkpoint.targets.copy_server import CopyHome, CopyServer
from weft.checkpoint.targets.store_path import Location, StorePath, located
from weft.checkpoint.targets.target import RangeReader, Sink, Target
from weft.checkpoint.targets.which_target import target_at

__all__ = [
    "CopyHome",
    "CopyServer",
    "Location",
    "RangeReader",
    "Sink",
    "StorePath",
    "Target",
    "copies_at",
    "located",
    "target_at",
]
