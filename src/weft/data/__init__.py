"""Data: from files to batches. Names are loaded at first use, so that preparing data costs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

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
    from weft.data.prepare import prepare_data
    from weft.data.prepared import PreparedData, PreparedSource, verify_data
    from weft.data.sharded import ShardedLoader
    from weft.data.stream import Sample, SampleStream
    from weft.data.tokenizer import Tokenizer

__getattr__ = loads(
    __name__,
    {
        "Batch": ".loader",
        "EvalBatches": ".loader",
        "Loader": ".loader",
        "Prefetch": ".loader",
        "PreparedData": ".prepared",
        "PreparedSource": ".prepared",
        "Sample": ".stream",
        "SampleStream": ".stream",
        "ShardedLoader": ".sharded",
        "Tokenizer": ".tokenizer",
        "prepare_data": ".prepare",
        "verify_data": ".prepared",
    },
)
