from __future__ import annotations

import torch
from torch import nn

from weft.optim import build_optimizer
from weft.spec.config import OptimizerSection


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    return net


def test_adamw_decays_matrices_only_and_leaves_frozen_parameters_out():
    net = model()
    section = OptimizerSection(lr=0.01, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    optimizer = build_optimizer(net.named_parameters(), section)
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, vectors = optimizer.param_groups
    assert {id(p) for p in matrices["params"]} == {id(net[0].weight), id(net[2].weight)}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert (matrices["lr"], matrices["betas"], matrices["eps"], matrices["fused"]) == (0.01, (0.8, 0.9), 1e-6, True)
    assert id(net[0].bias) not in {id(p) for p in vectors["params"]}


def test_sgd_is_torchs_own_step():
    torch.manual_seed(0)
    ours, theirs = model(), model()
    theirs.load_state_dict(ours.state_dict())
    section = OptimizerSection(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=True)
    first = build_optimizer(ours.named_parameters(), section)
    second = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
    x = torch.randn(8, 3)
    for _ in range(3):
        for net, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
