"""A task of single records, for federated runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn

from weft.train.tasks.base import Task

RECORDS = 60


class Points(Task):
    """Three classes of points.

    Args:
        norm: add a batch norm.
        bad_label: the loss of records with this label is NaN; -1 for none.
        kill: file whose absence makes the process kill itself once, in an early step; "" never.
        gap: record without a group; -1 for none.
    """

    def __init__(self, norm: bool = False, bad_label: int = -1, kill: str = "", gap: int = -1):
        self.norm, self.bad_label, self.kill, self.gap = norm, bad_label, kill, gap
        self.num_steps = 0

    def build(self) -> nn.Module:
        middle = [nn.BatchNorm1d(16)] if self.norm else []
        return nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)).double()

    def samples(self, split: str):
        random = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.randn(RECORDS, 8, generator=random, dtype=torch.float64)
        labels = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        groups = [("" if n == self.gap else f"user {n % 4}") for n in range(RECORDS)]
        return [{"x": one, "labels": label, "user": group} for one, label, group in zip(x, labels, groups, strict=True)]

    def collate(self, samples):
        return {"x": torch.stack([one["x"] for one in samples]), "labels": torch.stack([s["labels"] for s in samples])}

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, output, batch):
        self.num_steps += 1
        if self.kill and self.num_steps == 8 and not Path(self.kill).exists():
            Path(self.kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        labels = batch["labels"]
        total = nn.functional.cross_entropy(output, labels, reduction="sum")
        if (labels == self.bad_label).any():
            total = total * float("nan")
        return total, len(labels)


class PlainPoints(Points):
    """The same without dropout."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
