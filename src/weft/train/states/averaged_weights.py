"""Weights for evaluations, exports and checkpoints if an optimizer trains other weights than it evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from weft.config.plan import Plan
from weft.config.rules.optimizer_rules import averages_problem
from weft.errors import PlanError, Problem
from weft.optim.schedule_free import ScheduleFreeAdamW
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel, data_parallel


def averaged_slices(engine: DataParallel, optimizer: torch.optim.Optimizer) -> tuple[list[FlatSlice], list[FlatSlice]]:
    """Return the model's slices for checkpoints, with averages as values, and the slices of the trained weights.

    The second list is empty if the optimizer evaluates the weights that it trains, and before its first step. Local; no
    communication.
    """
    model = list(engine.model_slices())
    if not isinstance(optimizer, ScheduleFreeAdamW):
        return model, []
    other = {one.name.removesuffix("/z"): one for one in engine.state_slices(optimizer) if one.name.endswith("/z")}
    trained = [one for one in model if one.name in other]
    averages = {one.name: replace(one, flat=_average(optimizer, one, other[one.name]), home=None) for one in trained}
    return [averages.get(one.name, one) for one in model], trained


@torch.no_grad()
def _average(optimizer: ScheduleFreeAdamW, trained: FlatSlice, other: FlatSlice) -> torch.Tensor:
    assert (trained.start, trained.flat.numel()) == (other.start, other.flat.numel()), trained.name
    return optimizer.average(trained.flat, other.flat)


@contextmanager
def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the averages of the weights into a parallelized model for the duration of a block. All ranks call it.

    A copy of this rank's trained weights exists meanwhile, and is restored exactly. Without averages, do nothing.
    """
    if not isinstance(optimizer, ScheduleFreeAdamW):
        yield
        return
    engine = data_parallel(model)
    found, trained = averaged_slices(engine, optimizer)
    averages, before = {one.name: one.flat for one in found}, [one.flat.clone() for one in trained]
    _put(engine, trained, [averages[one.name] for one in trained])
    try:
        yield
    finally:
        _put(engine, trained, before)


@torch.no_grad()
def _put(engine: DataParallel, slices: list[FlatSlice], values: list[torch.Tensor]) -> None:
    for one, value in zip(slices, values, strict=True):
        one.flat.copy_(value)
        one.bring_home()
    engine.publish()


def load_trained(engine: DataParallel, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
    """Read the trained weights of a checkpoint whose model has their averages, if the optimizer needs them.

    All ranks call it, after the model is loaded.
    """
    if not isinstance(optimizer, ScheduleFreeAdamW) or not source.entries:
        return
    for one in engine.model_slices():
        if one.name in source.entries:
            one.fill(source)
    engine.publish()


def check_averages(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError if the plan cannot exchange an optimizer's trained weights and their averages."""
    if isinstance(optimizer, ScheduleFreeAdamW) and (problem := averages_problem(plan)):
        raise PlanError([Problem("plan", problem)])
