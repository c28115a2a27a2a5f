"""The seam for what computes: what an engine does, what it is made for, and what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Engine",
    "EngineJob",
    "Evaluation",
    "GROUPS",
    "LateResult",
    "Measures",
    "ReplicaWorld",
    "StepResult",
    "TraceKind",
    "derive_seed",
]

if TYPE_CHECKING:
    from weft.train.engine.engine import GROUPS, Engine
    from weft.train.engine.job import EngineJob, ReplicaWorld, derive_seed
    from weft.train.engine.measures import Measures
    from weft.train.engine.results import Evaluation, LateResult, StepResult, TraceKind

__getattr__ = loads(
    __name__,
    {
        "Engine": ".engine",
        "EngineJob": ".job",
        "Evaluation": ".results",
        "GROUPS": ".engine",
        "LateResult": ".results",
        "Measures": ".measures",
        "ReplicaWorld": ".job",
        "StepResult": ".results",
        "TraceKind": ".results",
        "derive_seed": ".job",
    },
)
