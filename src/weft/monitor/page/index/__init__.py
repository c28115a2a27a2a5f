"""What a page shows of a run, kept beside its growing log: read once, then only what was appended."""

from __future__ import annotations

from weft.monitor.page.index.run_index import RunIndex
from weft.monitor.page.index.shelf import Shelf
from weft.monitor.page.index.step_columns import StepColumns, bucket_edges, thinned

__all__ = ["RunIndex", "Shelf", "StepColumns", "bucket_edges", "thinned"]
