"""A task of single records, for runs of `weft train`."""

from __future__ import annotations

import torch
from torch import nn

from weft.train.tasks.base import Task


class Points(Task):
    """Two classes of points of 15 users; record `index` is fixed.

    gap: record without a user; -1 for none.
    """

    def __init__(self, gap: int = -1):
        self.gap = gap

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def samples(self, split: str):
        if split != "train":
            return None
        random = torch.Generator().manual_seed(0)
        x = torch.randn(200, 8, generator=random)
        users = ["" if n == self.gap else f"user {int(n**0.5)}" for n in range(200)]
        return list(zip(x, (x[:, 0] + x[:, 1] > 0).long(), users, strict=True))

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
