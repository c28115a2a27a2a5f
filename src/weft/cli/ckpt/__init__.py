"""`weft ckpt` and `weft resume-diff`: checkpoints of a run, without torch where no torch is needed."""

from __future__ import annotations

from weft.cli.ckpt.listing import table

__all__ = ["table"]
