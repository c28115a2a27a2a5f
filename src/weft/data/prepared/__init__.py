"""Training data in its stored form: made once, digested, reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "PreparedData",
    "PreparedSource",
    "SHARD_BYTES",
    "SplitCounts",
    "SplitReader",
    "SplitWriter",
    "check_trainable",
    "prepare_data",
    "sync",
    "verify_data",
]

if TYPE_CHECKING:
    from weft.data.prepared.lock import sync
    from weft.data.prepared.prepare import prepare_data
    from weft.data.prepared.prepared_data import PreparedData, PreparedSource, verify_data
    from weft.data.prepared.shards import SHARD_BYTES, SplitCounts, SplitReader, SplitWriter
    from weft.data.prepared.trainable import check_trainable

__getattr__ = loads(
    __name__,
    {
        "PreparedData": ".prepared_data",
        "PreparedSource": ".prepared_data",
        "SHARD_BYTES": ".shards",
        "SplitCounts": ".shards",
        "SplitReader": ".shards",
        "SplitWriter": ".shards",
        "check_trainable": ".trainable",
        "prepare_data": ".prepare",
        "sync": ".lock",
        "verify_data": ".prepared_data",
    },
)
