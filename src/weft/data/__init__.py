"""Data: from files to batches. Names are loaded at first use, so that preparing data costs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Batch": "loader",
    "EvalBatches": "loader",
    "Loader": "loader",
    "Prefetch": "loader",
    "PreparedData": "prepare",
    "PreparedSource": "prepare",
    "Sample": "stream",
    "SampleStream": "stream",
    "ShardedLoader": "sharded",
    "Tokenizer": "tokenizer",
    "prepare_data": "prepare",
    "verify_data": "prepare",
}

__all__ = [
    "Batch",
    "EvalBatches",
    "Loader",
    "Prefetch",
    "PreparedData",
    "PreparedSource",
    "Sample",
    "SampleStream",
    "ShardedLoader",
    "Tokenizer",
    "prepare_data",
    "verify_data",
]

if TYPE_CHECKING:
    from weft.data.loader import Batch, EvalBatches, Loader, Prefetch
    from weft.data.prepare import PreparedData, PreparedSource, prepare_data, verify_data
    from weft.data.sharded import ShardedLoader
    from weft.data.stream import Sample, SampleStream
    from weft.data.tokenizer import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.data.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
