"""Token ids on disk: the files of a split, checked by digests, and the locks under which they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "SHARD_BYTES",
    "SplitCounts",
    "SplitReader",
    "SplitWriter",
    "locked",
    "new_folder",
    "size_problems",
    "sync",
    "verify_split",
]

if TYPE_CHECKING:
    from weft.data.shards.lock import locked, new_folder, sync
    from weft.data.shards.split_files import (
        SHARD_BYTES,
        SplitCounts,
        SplitReader,
        SplitWriter,
        size_problems,
        verify_split,
    )

__getattr__ = loads(
    __name__,
    {
        "SHARD_BYTES": ".split_files",
        "SplitCounts": ".split_files",
        "SplitReader": ".split_files",
        "SplitWriter": ".split_files",
        "locked": ".lock",
        "new_folder": ".lock",
        "size_problems": ".split_files",
        "sync": ".lock",
        "verify_split": ".split_files",
    },
)
