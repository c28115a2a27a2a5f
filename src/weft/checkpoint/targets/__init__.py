"""Where checkpoints are kept: a folder of a file system, or a prefix of an object store. All else asks a `Target`."""

from __future__ import annotations

from weft.checkpoint.targets.store_path import Location, StorePath, located
from weft.checkpoint.targets.target import RangeReader, Sink, Target
from weft.checkpoint.targets.which_target import target_at

__all__ = ["Location", "RangeReader", "Sink", "StorePath", "Target", "located", "target_at"]
