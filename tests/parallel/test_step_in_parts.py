"""zero=3 steps the first parameters of the next forward before the others, with equal bits and one step each."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.parallel.loops import mlp, rows
from weft.comm.mesh import Axis
from weft.optim.step_decision import StepDecision
from weft.parallel.zero.engine import step_by_decision, steps_in_parts
from weft.parallel.zero_sharded.hooks import FirstGathers, Order


def decision(norm: float) -> StepDecision:
    return StepDecision(torch.tensor([3.0, 8.0, norm], dtype=torch.float64), 8.0, 4.0, 0.5)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_step_in_two_parts_equals_one_step(name):
    single = mlp()
    split = copy.deepcopy(single)
    changes: list[list[bool]] = []
    optimizers = [optimizer_of(model, name) for model in (single, split)]
    assert steps_in_parts(optimizers[0])
    for step_index, norm in enumerate((3.0, float("nan"), 0.1)):  # the second step is skipped
        before = [param.detach().clone() for param in split.parameters()]
        for model in (single, split):
            model.zero_grad()
            model(rows(step_index)).square().sum().backward()
        step_by_decision(optimizers[0], decision(norm))
        first = {id(next(split.parameters()))}

        def record(before: list[torch.Tensor] = before) -> None:
            params = zip(split.parameters(), before, strict=True)
            changes.append([not torch.equal(now, then) for now, then in params])

        step_by_decision(optimizers[1], decision(norm), first, record)
        for one, other in zip(single.parameters(), split.parameters(), strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
    rest = [False] * (len(before) - 1)
    assert changes == [[True, *rest], [False, *rest], [True, *rest]]
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("handed_over", [False, True])
def test_early_gathers_are_dropped_unless_handed_over(handed_over):
    first = FirstGathers([mlp()], [[]], Order(Axis("dp_shard", 1, 0, (0,)), ["root"]), torch.device("cpu"))
    module, handle = Mock(), Mock()
    first._early = [(module, handle)]
    if handed_over:
        first.hand_over()
    first.drop()
    first.drop()
    for call in (handle.wait, module.reshard):
        assert call.call_count == (0 if handed_over else 1)


def test_unknown_optimizer_does_not_step_in_parts():
    assert not steps_in_parts(torch.optim.NAdam(mlp().parameters()))
