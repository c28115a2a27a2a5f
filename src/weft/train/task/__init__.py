"""The seam for kinds of training: what a task is, and what it has where it says nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Batches",
    "Forwards",
    "Metric",
    "Report",
    "Share",
    "Task",
    "Which",
    "adapter_size",
    "describe_by_samples",
    "describe_by_tracing",
    "describe_folder",
    "described",
    "sample_in_order",
    "sample_place",
    "trace",
    "with_adapter",
]

if TYPE_CHECKING:
    from weft.train.task.description import describe_by_tracing, describe_folder, trace
    from weft.train.task.forwards import Forwards, Which
    from weft.train.task.indexed import sample_in_order, sample_place
    from weft.train.task.run_adapter import adapter_size, with_adapter
    from weft.train.task.sample_view import described
    from weft.train.task.share import Batches, Share
    from weft.train.task.task import Metric, Report, Task
    from weft.train.task.traced_task import describe_by_samples

__getattr__ = loads(
    __name__,
    {
        "Batches": ".share",
        "Forwards": ".forwards",
        "Metric": ".task",
        "Report": ".task",
        "Share": ".share",
        "Task": ".task",
        "Which": ".forwards",
        "adapter_size": ".run_adapter",
        "describe_by_samples": ".traced_task",
        "describe_by_tracing": ".description",
        "describe_folder": ".description",
        "described": ".sample_view",
        "sample_in_order": ".indexed",
        "sample_place": ".indexed",
        "trace": ".description",
        "with_adapter": ".run_adapter",
    },
)
