"""Training: the step, the loop around it, and a run from its folder.

Names are loaded at first use: what prepares a run and starts its ranks needs none of the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Hook",
    "Microbatches",
    "Progress",
    "RunFolder",
    "RunResult",
    "StepMetrics",
    "TrainStep",
    "Trainer",
    "generate_text",
    "prepare_run",
    "run_rank",
]

if TYPE_CHECKING:
    from weft.train.folder import RunFolder, prepare_run
    from weft.train.hooks import Hook
    from weft.train.loop import Progress, Trainer
    from weft.train.microbatches import Microbatches
    from weft.train.run import RunResult, run_rank
    from weft.train.sample import generate_text
    from weft.train.step import StepMetrics, TrainStep

__getattr__ = loads(
    __name__,
    {
        "Hook": ".hooks",
        "Microbatches": ".microbatches",
        "Progress": ".loop",
        "RunFolder": ".folder",
        "RunResult": ".run",
        "StepMetrics": ".step",
        "TrainStep": ".step",
        "Trainer": ".loop",
        "generate_text": ".sample",
        "prepare_run": ".folder",
        "run_rank": ".run",
    },
)
