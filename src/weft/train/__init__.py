"""Training: the step, the loop around it, and a run from its folder.

Names are loaded at first use: what prepares a run and starts its ranks needs none of the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Engine",
    "Hook",
    "Metric",
    "Microbatches",
    "Progress",
    "RunFolder",
    "RunResult",
    "Start",
    "StepMetrics",
    "Task",
    "TrainStep",
    "Trainer",
    "generate_text",
    "prepare_run",
    "run_folder",
    "run_rank",
]

if TYPE_CHECKING:
    from weft.train.engine import Engine
    from weft.train.folder import RunFolder, run_folder
    from weft.train.loop import Hook, Progress, Trainer
    from weft.train.microbatch import Microbatches
    from weft.train.run import RunResult, Start, prepare_run, run_rank
    from weft.train.step import StepMetrics, TrainStep
    from weft.train.task import Metric, Task
    from weft.train.tasks import generate_text

__getattr__ = loads(
    __name__,
    {
        "Engine": ".engine",
        "Hook": ".loop",
        "Metric": ".task",
        "Microbatches": ".microbatch",
        "Progress": ".loop",
        "RunFolder": ".folder",
        "RunResult": ".run",
        "Start": ".run",
        "StepMetrics": ".step",
        "Task": ".task",
        "TrainStep": ".step",
        "Trainer": ".loop",
        "generate_text": ".tasks",
        "prepare_run": ".run",
        "run_folder": ".folder",
        "run_rank": ".run",
    },
)
