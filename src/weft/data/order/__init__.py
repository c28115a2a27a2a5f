"""Which sample comes when: a pure function of seed, epoch and index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Batch",
    "EvalBatches",
    "Loader",
    "Prefetch",
    "Sample",
    "SampleStream",
    "SampleView",
    "ShardedLoader",
    "derive_key",
    "marked",
    "permutation",
    "rows_of",
    "view_answer",
    "view_sample",
    "visible",
    "write_plan",
]

if TYPE_CHECKING:
    from weft.data.order.loader import Batch, EvalBatches, Loader, Prefetch
    from weft.data.order.packing import write_plan
    from weft.data.order.preview import SampleView, marked, view_answer, view_sample, visible
    from weft.data.order.sample_order import derive_key, permutation
    from weft.data.order.sample_rows import rows_of
    from weft.data.order.sharded import ShardedLoader
    from weft.data.order.stream import Sample, SampleStream

__getattr__ = loads(
    __name__,
    {
        "Batch": ".loader",
        "EvalBatches": ".loader",
        "Loader": ".loader",
        "Prefetch": ".loader",
        "Sample": ".stream",
        "SampleStream": ".stream",
        "SampleView": ".preview",
        "ShardedLoader": ".sharded",
        "derive_key": ".sample_order",
        "marked": ".preview",
        "permutation": ".sample_order",
        "rows_of": ".sample_rows",
        "view_answer": ".preview",
        "view_sample": ".preview",
        "visible": ".preview",
        "write_plan": ".packing",
    },
)
