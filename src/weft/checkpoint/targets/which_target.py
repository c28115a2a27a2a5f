"""The one place that tells a folder from an object store."""

from __future__ import annotations

from weft.checkpoint.targets.folder_target import FolderTarget
from weft.checkpoint.targets.store_path import Location, StorePath
from weft.checkpoint.targets.store_target import StoreTarget
from weft.checkpoint.targets.target import Target


def target_at(root: Location) -> Target:
    """Return what keeps the checkpoints that lie in `root`."""
    return StoreTarget(root) if isinstance(root, StorePath) else FolderTarget(root)
