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
    from weft.data.order import (
        Batch,
        EvalBatches,
        Loader,
        Prefetch,
        Sample,
        SampleStream,
        SampleView,
        ShardedLoader,
        marked,
        view_sample,
        visible,
    )
    from weft.data.prepared import PreparedData, PreparedSource, prepare_data, verify_data
    from weft.data.tokens import Tokenizer

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
        "SampleView": ".order.preview",
        "ShardedLoader": ".order.sharded",
        "Tokenizer": ".tokens.tokenizer",
        "marked": ".order.preview",
        "prepare_data": ".prepared.prepare",
        "verify_data": ".prepared.prepared_data",
        "view_sample": ".order.preview",
        "visible": ".order.preview",
    },
)
