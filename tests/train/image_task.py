"""A task of one's own in forty lines: a small vision transformer that tells bright corners of images apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from weft.train import Metric, Task


class Images(Sequence):
    """Synthetic: noise with one bright corner, which is the label. A sample is (image (1, side, side), label)."""

    def __init__(self, number: int, side: int, seed: int):
        self.number, self.side, self.seed = number, side, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.randn(1, self.side, self.side, generator=torch.Generator().manual_seed(self.seed + index))
        label, half = index % 4, self.side // 2
        image[:, label // 2 * half :][:, :half, label % 2 * half :][:, :, :half] += 1.0
        return image, label


class Classifier(nn.Module):
    """Patches, a transformer over them, and the mean of its outputs as class scores (B, 4)."""

    def __init__(self, side: int, dim: int):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, kernel_size=side // 4, stride=side // 4)
        self.places = nn.Parameter(0.02 * torch.randn(16, dim))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 2, 2 * dim, 0.0, batch_first=True) for _ in "ab")
        self.head = nn.Linear(dim, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@dataclass
class ImageTask(Task):
    """Classifies images. side: pixels. dim: width of the model."""

    unit = sample_unit = "images"
    metrics = (Metric("accuracy", "accuracy", "Share of images whose label the model names."),)
    sum_names = ("right",)

    side: int = 8
    dim: int = 16

    def build(self):
        return Classifier(self.side, self.dim)

    def samples(self, split):
        return Images(64, self.side, seed=0) if split == "train" else Images(16, self.side, seed=10_000)

    def loss(self, output, batch):
        return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])

    def sums(self, output, batch):
        return {"right": (output.argmax(1) == batch[1]).sum()}

    def measure(self, sums):
        return {"accuracy": sums["right"] / sums["count"]}
