"""Training: the step, the loop around it, and a run from its folder.

Names are loaded at first use: what prepares a run and starts its ranks needs none of the models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Hook": "hooks",
    "Progress": "loop",
    "RunFolder": "folder",
    "RunResult": "run",
    "StepMetrics": "step",
    "TrainStep": "step",
    "Trainer": "loop",
    "generate_text": "sample",
    "prepare_run": "folder",
    "run_rank": "run",
}

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

if TYPE_CHECKING:
    from weft.train.folder import RunFolder, prepare_run
    from weft.train.hooks import Hook
    from weft.train.loop import Progress, Trainer
    from weft.train.run import RunResult, run_rank
    from weft.train.sample import generate_text
    from weft.train.step import StepMetrics, TrainStep


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weft.train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
