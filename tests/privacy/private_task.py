"""A task of single records, for runs of `weft train`."""

from __future__ import annotations

import torch
from torch import nn

from weft.train.tasks.base import Task


class Points(Task):
    """Two classes of points; record `index` is a fixed pair."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def samples(self, split: str):
        if split != "train":
            return None
        random = torch.Generator().manual_seed(0)
        x = torch.randn(200, 8, generator=random)
        return list(zip(x, (x[:, 0] + x[:, 1] > 0).long(), strict=True))

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
