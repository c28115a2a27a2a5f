"""Under a pipeline, results that depend on the microbatches are warned of or refused, and others equal one process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import pytest
import torch

from tests.train.batch_kinds import D
from tests.train.stage_kinds import INTERACTING, LEGAL
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.train.script import Run

SAMPLES = 8


@dataclass
class Trained:
    """What a rank warned of or refused, its losses, and its weights by name."""

    said: list[str] = field(default_factory=list)
    losses: list[float] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_all(plan: str, names: list[str], steps: int = 2) -> dict[str, Trained]:
    parsed = Plan.parse(f"{plan} precision=fp64")
    run = Run(parsed, build_mesh(parsed), Ledger(), 0)
    return {name: train(run, name, steps) for name in names}


def train(run: Run, name: str, steps: int) -> Trained:
    build, loss = LEGAL[name] if name in LEGAL else (INTERACTING[name].build, INTERACTING[name].loss)
    trained, size, rank = Trained(), SAMPLES // run.mesh.data.size, run.mesh.data.rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = run.parallelize(build().double())
            step = run.train_step(model, torch.optim.SGD, loss, lr=0.01)
            losses = []
            for number in range(steps):
                generator = torch.Generator().manual_seed(number)
                batch = [torch.randn(SAMPLES, D, generator=generator).double() for _ in range(2)]
                losses.append(step(tuple(one[rank * size : (rank + 1) * size] for one in batch)).loss)
        except ModelError as error:
            trained.said = [str(error)]
            return trained
    trained.said = [str(one.message) for one in caught if one.category is WeftWarning]
    trained.losses = losses
    trained.weights = {path: one.detach().clone() for path, one in model.named_parameters() if not one.is_meta}
    return trained
