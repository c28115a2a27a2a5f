"""Data pipeline, from files to batches. Names are imported at first use, and preparing data does not import torch."""

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
    "SampleView",
    "ShardedLoader",
    "Tokenizer",
    "marked",
    "prepare_data",
    "verify_data",
    "view_sample",
    "visible",
]

if TYPE_CHECKING:
    from weft.data.order.loader import Batch, EvalBatches, Loader, Prefetch, SampleView, marked, view_sample, visible
    from weft.data.order.stream import Sample, SampleStream
    from weft.data.order.user_dataloader import ShardedLoader
    from weft.data.store.prepare import prepare_data
    from weft.data.store.prepared import PreparedData, PreparedSource, verify_data
    from weft.data.text.tokenizer import Tokenizer

__getattr__ = loads(
    __name__,
    {
        "Batch": ".order.loader",
        "EvalBatches": ".order.loader",
        "Loader": ".order.loader",
        "Prefetch": ".order.loader",
        "PreparedData": ".store.prepared",
        "PreparedSource": ".store.prepared",
        "Sample": ".order.stream",
        "SampleStream": ".order.stream",
        "SampleView": ".order.loader",
        "ShardedLoader": ".order.user_dataloader",
        "Tokenizer": ".text.tokenizer",
        "marked": ".order.loader",
        "prepare_data": ".store.prepare",
        "verify_data": ".store.prepared",
        "view_sample": ".order.loader",
        "visible": ".order.loader",
    },
)
