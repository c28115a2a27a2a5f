"""Selection of the checkpoint target: a folder or an object store."""

from __future__ import annotations

from weft.checkpoint.object_store import Location, StorePath, StoreTarget
from weft.checkpoint.targets import FolderTarget, Target


def target_at(root: Location) -> Target:
    """Return the target for the checkpoints in `root`."""
    return StoreTarget(root) if isinstance(root, StorePath) else FolderTarget(root)
