"""A recommender as a task: pairs of user and item with a rating."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from weft.train import Task

USERS, ITEMS, UNUSED = 40, 12, 10


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4)
        self.top = nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


@dataclass
class RatingTask(Task):
    """Predicts ratings. The last UNUSED users have none."""

    def build(self) -> nn.Module:
        return Ratings()

    def samples(self, split: str) -> TensorDataset:
        rng = torch.Generator().manual_seed(len(split))
        users = torch.randint(USERS - UNUSED, (64,), generator=rng)
        items = torch.randint(ITEMS, (64,), generator=rng)
        return TensorDataset(users, items, (users % 3 - items % 2).float())

    def loss(self, output: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        return F.mse_loss(output, batch[2], reduction="sum"), len(output)
