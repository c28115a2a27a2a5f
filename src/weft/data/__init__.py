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
    from weft.data.order.loader import Batch, EvalBatches, Loader, Prefetch
    from weft.data.order.sharded import ShardedLoader
    from weft.data.order.stream import Sample, SampleStream
    from weft.data.prepared.prepare import prepare_data
    from weft.data.prepared.prepared_data import PreparedData, PreparedSource, verify_data
    from weft.data.tokens.tokenizer import Tokenizer

__getattr__ = loads(
    __name__,
    {
        "Batch": ".order.loader",
        "EvalBatches": ".order.loader",
        "Loader": ".order.loader",
        "Prefetch": ".order.loader",
        "PreparedData": ".prepared.prepared_data",
        "PreparedSource": ".prepared.prepared_data",
        "Sample": ".order.stream",
        "SampleStream": ".order.stream",
        "ShardedLoader": ".order.sharded",
        "Tokenizer": ".tokens.tokenizer",
        "prepare_data": ".prepared.prepare",
        "verify_data": ".prepared.prepared_data",
    },
)
