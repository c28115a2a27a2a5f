"""Model and optimizer as a checkpoint holds them, and what ranks do together to write and read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Copies",
    "DigestsBehind",
    "adapter_state",
    "capture_model",
    "copied",
    "expected_bytes",
    "gather",
    "model_tensors",
    "on_each",
    "on_first",
    "pieces",
    "restore_model",
    "resume",
    "together",
    "written",
]

if TYPE_CHECKING:
    from weft.train.state.base import adapter_state
    from weft.train.state.copies import Copies
    from weft.train.state.digests_behind import DigestsBehind
    from weft.train.state.on_ranks import gather, on_each, on_first, together
    from weft.train.state.state import (
        capture_model,
        copied,
        expected_bytes,
        model_tensors,
        pieces,
        restore_model,
        resume,
        written,
    )

__getattr__ = loads(
    __name__,
    {
        "Copies": ".copies",
        "DigestsBehind": ".digests_behind",
        "adapter_state": ".base",
        "capture_model": ".state",
        "copied": ".state",
        "expected_bytes": ".state",
        "gather": ".on_ranks",
        "model_tensors": ".state",
        "on_each": ".on_ranks",
        "on_first": ".on_ranks",
        "pieces": ".state",
        "restore_model": ".state",
        "resume": ".state",
        "together": ".on_ranks",
        "written": ".state",
    },
)
