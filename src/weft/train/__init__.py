"""Training: the step, the loop around it, and a run from its folder."""

from weft.train.folder import RunFolder, prepare_run
from weft.train.hooks import Hook
from weft.train.loop import Progress, Trainer
from weft.train.run import RunResult, run_rank
from weft.train.sample import generate_text
from weft.train.step import StepMetrics, TrainStep

__all__ = [
    "Hook",
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
