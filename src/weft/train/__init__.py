"""The training step, the training loop, and runs from their folder. Names are imported on first use."""

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
    from weft.train.batches.microbatches import Microbatches
    from weft.train.engine import Engine
    from weft.train.folder import RunFolder, run_folder
    from weft.train.hooks import Hook, Progress
    from weft.train.loop.trainer import Trainer
    from weft.train.preparation import prepare_run
    from weft.train.rank_run import RunResult, Start, run_rank
    from weft.train.step.train_step import TrainStep
    from weft.train.step.update import StepMetrics
    from weft.train.tasks.base import Metric, Task
    from weft.train.tasks.generation import generate_text

__getattr__ = loads(
    __name__,
    {
        "Engine": ".engine",
        "Hook": ".hooks",
        "Metric": ".tasks.base",
        "Microbatches": ".batches.microbatches",
        "Progress": ".hooks",
        "RunFolder": ".folder",
        "RunResult": ".rank_run",
        "Start": ".rank_run",
        "StepMetrics": ".step.update",
        "Task": ".tasks.base",
        "TrainStep": ".step.train_step",
        "Trainer": ".loop.trainer",
        "generate_text": ".tasks.generation",
        "prepare_run": ".preparation",
        "run_folder": ".folder",
        "run_rank": ".rank_run",
    },
)
