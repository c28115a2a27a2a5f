"""What a page shows of a run, kept beside its growing log: read once, then only what was appended."""

from __future__ import annotations

from weft.watch.index.run_index import RunIndex
from weft.watch.index.shelf import Shelf

__all__ = ["RunIndex", "Shelf"]
