"""Where a step went wrong: which module, on which rank, of which samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "StepTracer",
    "TracedStep",
]

if TYPE_CHECKING:
    from weft.train.step.tracing.step_tracer import StepTracer, TracedStep

__getattr__ = loads(
    __name__,
    {
        "StepTracer": ".step_tracer",
        "TracedStep": ".step_tracer",
    },
)
