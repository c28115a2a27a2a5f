"""One optimizer step of a torch model, and what stands around it.

How a model is called, what a loss gives, how a batch is cut, what evaluations add up, what a checkpoint holds, and what
to do when memory runs out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ForwardFn",
    "LossFn",
    "RankForwards",
    "StepMetrics",
    "TrainStep",
    "WholeBatchLoss",
    "evaluate",
    "group_loss",
    "mean_loss",
    "live_bytes",
]

if TYPE_CHECKING:
    from weft.train.step.evaluation import evaluate, mean_loss
    from weft.train.step.grouped_loss import group_loss
    from weft.train.step.loss_check import LossFn
    from weft.train.step.oom import live_bytes
    from weft.train.step.rank_forwards import RankForwards
    from weft.train.step.step_metrics import StepMetrics
    from weft.train.step.train_step import ForwardFn, TrainStep
    from weft.train.step.whole_batch import WholeBatchLoss

__getattr__ = loads(
    __name__,
    {
        "ForwardFn": ".train_step",
        "LossFn": ".loss_check",
        "RankForwards": ".rank_forwards",
        "StepMetrics": ".step_metrics",
        "TrainStep": ".train_step",
        "WholeBatchLoss": ".whole_batch",
        "evaluate": ".evaluation",
        "group_loss": ".grouped_loss",
        "mean_loss": ".evaluation",
        "live_bytes": ".oom",
    },
)
