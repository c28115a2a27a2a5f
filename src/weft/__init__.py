"""Weft: one plan for training PyTorch models, from a laptop to a cluster.

Names are loaded at first use, so that `import weft` stays fast and free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__version__ = "0.1.0"

__all__ = [
    "ClusterSpec",
    "Layout",
    "Microbatches",
    "ModelSpec",
    "Plan",
    "Run",
    "RunConfig",
    "TrainStep",
    "WeftError",
    "WeftWarning",
    "bernoulli",
    "build_mesh",
    "describe",
    "group_loss",
    "init",
    "rand_like",
    "randint_like",
    "randn_like",
    "search",
    "trace",
]

if TYPE_CHECKING:
    from weft.errors import WeftError, WeftWarning
    from weft.mesh import build_mesh
    from weft.parallel.randomness import bernoulli, rand_like, randint_like, randn_like
    from weft.planner.tell import search
    from weft.spec import ClusterSpec, Layout, ModelSpec, RunConfig
    from weft.spec.plan import Plan
    from weft.structure.cost import describe
    from weft.train import Microbatches, TrainStep
    from weft.train.script import Run, init
    from weft.train.step import group_loss
    from weft.train.task import trace

__getattr__ = loads(
    __name__,
    {
        "Plan": ".spec.plan",
        "ModelSpec": ".spec.model",
        "ClusterSpec": ".spec.cluster",
        "Layout": ".spec.layout",
        "RunConfig": ".spec.config",
        "WeftError": ".errors",
        "WeftWarning": ".errors",
        "describe": ".structure.cost",
        "group_loss": ".train.step",
        "bernoulli": ".parallel.randomness",
        "rand_like": ".parallel.randomness",
        "randint_like": ".parallel.randomness",
        "randn_like": ".parallel.randomness",
        "search": ".planner.tell",
        "trace": ".train.task",
        "build_mesh": ".mesh",
        "Mesh": ".mesh",
        "Microbatches": ".train",
        "init": ".train.script",
        "Run": ".train.script",
        "TrainStep": ".train",
    },
)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
