"""zero=3 steps what the next forward begins with before the rest: the same bits, and each part once."""

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
def test_two_parts_are_one_step(name):
    whole = mlp()
    parted = copy.deepcopy(whole)
    seen: list[list[bool]] = []
    optimizers = [optimizer_of(model, name) for model in (whole, parted)]
    assert steps_in_parts(optimizers[0])
    for turn, norm in enumerate((3.0, float("nan"), 0.1)):  # the second is not taken
        before = [param.detach().clone() for param in parted.parameters()]
        for model in (whole, parted):
            model.zero_grad()
            model(rows(turn)).square().sum().backward()
        step_by_decision(optimizers[0], decision(norm))
        first = {id(next(parted.parameters()))}

        def look(before: list[torch.Tensor] = before) -> None:
            params = zip(parted.parameters(), before, strict=True)
            seen.append([not torch.equal(now, then) for now, then in params])

        step_by_decision(optimizers[1], decision(norm), first, look)
        for one, other in zip(whole.parameters(), parted.parameters(), strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
    rest = [False] * (len(before) - 1)
    assert seen == [[True, *rest], [False, *rest], [True, *rest]]
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("handed_over", [False, True])
def test_what_was_gathered_early_goes_where_shards_may_change_and_stays_where_a_pass_begins(handed_over):
    first = FirstGathers([mlp()], [[]], Order(Axis("dp_shard", 1, 0, (0,)), ["root"]), torch.device("cpu"))
    module, handle = Mock(), Mock()
    first._early = [(module, handle)]
    if handed_over:
        first.hand_over()
    first.drop()
    first.drop()
    for call in (handle.wait, module.reshard):
        assert call.call_count == (0 if handed_over else 1)


def test_an_optimizer_that_weft_does_not_know_steps_at_once():
    assert not steps_in_parts(torch.optim.NAdam(mlp().parameters()))
