"""A model whose contrastive loss compares each sample with its group, as for image and caption pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.verify.parity import ParityResult, SampleCase, train_case, train_plain

IN, DIM = 6, 8


@weft.group_loss(4)
def contrast(own, group, places):
    """Return the loss of matching each first feature with its second one, and vice versa."""
    [mine], [all_features] = own, group
    scores = torch.cat([mine[:, 0] @ all_features[:, 1].t(), mine[:, 1] @ all_features[:, 0].t()])
    return F.cross_entropy(scores, places.repeat(2), reduction="sum"), len(places)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(IN, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).unflatten(-1, (2, DIM))


@dataclass(frozen=True)
class GroupCase(SampleCase):
    """`global_batch` samples per step, in groups of four."""

    global_batch: int
    num_steps: int = 2
    max_grad_norm: float = 0.5

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return Pairs().double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def samples(self, step: int) -> list[torch.Tensor]:
        return list(torch.randn(self.global_batch, IN, generator=torch.Generator().manual_seed(step)).double())

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    loss = staticmethod(contrast)


def train_groups(plans: list[str], sizes: tuple[int, ...] = (8, 7)) -> dict[tuple[str, int], ParityResult]:
    """Train each plan with full groups, and with a last group of three. The plan "" is plain PyTorch."""
    return {
        (plan, size): train_case(f"{plan} precision=fp64", GroupCase(size)) if plan else train_plain(GroupCase(size))
        for plan in plans
        for size in sizes
    }
