"""Weft: one plan for training PyTorch models, from a laptop to a cluster.

Names are loaded at first use, so that `import weft` stays fast and free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> module that holds it.
_HOMES = {
    "Plan": "weft.spec.plan",
    "ModelSpec": "weft.spec.model",
    "ClusterSpec": "weft.spec.cluster",
    "Layout": "weft.spec.layout",
    "RunConfig": "weft.spec.config",
    "WeftError": "weft.errors",
    "describe": "weft.models",
    "search": "weft.planner.search",
    "trace": "weft.parallel.traced",
    "build_mesh": "weft.mesh",
    "Mesh": "weft.mesh",
    "init": "weft.api",
    "Run": "weft.api",
    "TrainStep": "weft.train",
}

__all__ = [
    "ClusterSpec",
    "Layout",
    "Mesh",
    "ModelSpec",
    "Plan",
    "Run",
    "RunConfig",
    "TrainStep",
    "WeftError",
    "build_mesh",
    "describe",
    "init",
    "search",
    "trace",
]

if TYPE_CHECKING:
    from weft.api import Run, init
    from weft.errors import WeftError
    from weft.mesh import Mesh, build_mesh
    from weft.models import describe
    from weft.parallel.traced import trace
    from weft.planner.search import search
    from weft.spec.cluster import ClusterSpec
    from weft.spec.config import RunConfig
    from weft.spec.layout import Layout
    from weft.spec.model import ModelSpec
    from weft.spec.plan import Plan
    from weft.train import TrainStep


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
