"""A model whose loss compares each sample with those of its group: pairs of features, as in picture and caption."""

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
    """Which second half of the group belongs to each first half, and the other way round."""
    [mine], [all_of_them] = own, group
    scores = torch.cat([mine[:, 0] @ all_of_them[:, 1].t(), mine[:, 1] @ all_of_them[:, 0].t()])
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
    """size: samples of a step, of which groups have four."""

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
    """Each plan with full groups, and with a last one of three; "": PyTorch alone."""
    return {
        (plan, size): train_case(f"{plan} precision=fp64", GroupCase(size)) if plan else train_plain(GroupCase(size))
        for plan in plans
        for size in sizes
    }
