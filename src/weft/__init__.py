"""Weft: one plan for training PyTorch models, from a laptop to a cluster.

Names are imported at first use, so that `import weft` is fast and does not import torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weft.lazy import loads

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("Weft runs on Linux and macOS. On Windows, install it in WSL 2.")

__all__ = [
    "ClusterSpec",
    "Layout",
    "Microbatches",
    "ModelSpec",
    "Plan",
    "Privacy",
    "Run",
    "RunConfig",
    "TableOptimizer",
    "TrainStep",
    "WeftError",
    "WeftWarning",
    "bernoulli",
    "build_mesh",
    "describe",
    "group_loss",
    "init",
    "launch",
    "pool",
    "rand_like",
    "randint_like",
    "randn_like",
    "search",
    "trace",
]

if TYPE_CHECKING:
    from weft.comm.mesh import build_mesh
    from weft.config.cluster import ClusterSpec
    from weft.config.fields.layout import Layout
    from weft.config.plan import Plan
    from weft.config.run_config import RunConfig
    from weft.config.shapes.model_spec import ModelSpec
    from weft.errors import WeftError, WeftWarning
    from weft.models.inspect.describe import describe
    from weft.optim.table_optimizer import TableOptimizer
    from weft.parallel.random.draws import bernoulli, rand_like, randint_like, randn_like
    from weft.planner.report.explanation import search
    from weft.pools.pool import pool
    from weft.privacy.settings import Privacy
    from weft.train.batches.microbatches import Microbatches
    from weft.train.losses import group_loss
    from weft.train.script.script_run import Run, init
    from weft.train.step.train_step import TrainStep
    from weft.train.tasks.description import trace
    from weft.verify.function_launch import launch

__getattr__ = loads(
    __name__,
    {
        "Plan": ".config.plan",
        "ModelSpec": ".config.shapes.model_spec",
        "ClusterSpec": ".config.cluster",
        "Layout": ".config.fields.layout",
        "RunConfig": ".config.run_config",
        "WeftError": ".errors",
        "WeftWarning": ".errors",
        "describe": ".models.inspect.describe",
        "TableOptimizer": ".optim.table_optimizer",
        "group_loss": ".train.losses",
        "bernoulli": ".parallel.random.draws",
        "rand_like": ".parallel.random.draws",
        "randint_like": ".parallel.random.draws",
        "randn_like": ".parallel.random.draws",
        "search": ".planner.report.explanation",
        "pool": ".pools.pool",
        "trace": ".train.tasks.description",
        "build_mesh": ".comm.mesh",
        "Mesh": ".comm.mesh",
        "Microbatches": ".train.batches.microbatches",
        "init": ".train.script.script_run",
        "Privacy": ".privacy.settings",
        "Run": ".train.script.script_run",
        "TrainStep": ".train.step.train_step",
        "launch": ".verify.function_launch",
    },
)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
