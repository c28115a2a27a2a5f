"""Torch optimizers on shards of parameters match the same optimizers on full parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.loops import STAGES, laid_out, mlp, plain_weights, rows, weights
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.optim.muon import Muon
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.3),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "lamb-like": lambda params: NormScaledSGD(params, lr=0.1),
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.1),
}


class NormScaledSGD(torch.optim.SGD):
    """An optimizer unknown to torch whose step depends on the norm of the full parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(param.detach().norm() / (param.grad.norm() + 1e-9))
        return super().step(closure)


def train(plan: str, name: str) -> dict[str, torch.Tensor]:
    model, mesh = laid_out(plan, mlp())
    optimizer = OPTIMIZERS[name](model.parameters())
    step = TrainStep(model, optimizer, lambda out, _: (out.square().sum(), len(out)), mesh, max_grad_norm=0.5)
    for index in range(4):
        step(rows(index, mesh.rank))
    return weights(model)


def train_plain(name: str) -> dict[str, torch.Tensor]:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    for index in range(4):
        optimizer.zero_grad()
        (model(rows(index)).square().sum() / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return plain_weights(model)


def train_all(plan: str) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(plan, name) for name in OPTIMIZERS}


@pytest.mark.parametrize("plan", STAGES)
def test_optimizer_on_shards_matches_full_parameters(plan, ranks2):
    for results in ranks2.run(train_all, plan + " precision=fp64"):
        for name, got in results.items():
            torch.testing.assert_close(got, train_plain(name), rtol=1e-9, atol=1e-12, msg=lambda text, n=name: n + text)


def groups_after(plan: str) -> list[tuple[float, int]]:
    """Return weight decay and number of elements per group."""
    model, _ = laid_out(plan, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
            {"params": [*(p for p in model.parameters() if p.ndim == 1), frozen], "weight_decay": 0.0},
        ]
    )
    data_parallel(model).adopt(optimizer)
    data_parallel(model).adopt(optimizer)
    return [(g["weight_decay"], sum(p.numel() for p in g["params"])) for g in optimizer.param_groups]


def test_groups_are_preserved_and_each_element_has_one_owner(ranks2):
    (decay_0, plain_0), (decay_1, plain_1) = ranks2.run(groups_after, "dp_shard=2 zero=1")
    assert decay_0[0] == decay_1[0] == 0.3
    assert decay_0[1] + decay_1[1] == 8 * 16 + 16 * 4
    assert plain_0[1] + plain_1[1] == 16 + 4 + 2 * 3  # the frozen parameter stays unsharded


def named_groups(plan: str) -> list[list[str]]:
    model, _ = laid_out(plan, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.named_parameters())
    data_parallel(model).adopt(optimizer)
    return [group["param_names"] for group in optimizer.param_groups]


def test_param_names_match_the_sharded_parameters(ranks2):
    (first,), (second,) = ranks2.run(named_groups, "dp_shard=2 zero=1")
    assert {*first, *second} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def muon_shapes(plan: str) -> tuple[list[tuple[int, ...]], float]:
    """Return the shapes of Muon's parameters on this rank, and the size of buckets relative to parameters."""
    mesh = build_mesh(Plan.parse(plan))
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(6))), mesh)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    data_parallel(model).adopt(optimizer)
    size = sum(bucket.size for bucket in data_parallel(model).reducer.buckets)
    return [tuple(p.shape) for p in optimizer.param_groups[0]["params"]], size / (6 * 24 * 24)


def test_muon_matrices_are_assigned_unsharded_and_evenly(ranks2):
    for shapes, fill in ranks2.run(muon_shapes, "dp_shard=2 zero=1"):
        assert shapes == [(24, 24)] * 3
        assert fill <= 1.05
