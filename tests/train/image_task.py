"""A task of one's own: a small convolutional network tells which row of a noisy image is bright."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from weft.train import Metric, Task


@dataclass
class ImageTask(Task):
    """Classifies images. side: of an image in pixels. dim: channels of the network."""

    side: int = 8
    dim: int = 16

    unit = sample_unit = "images"
    metrics = (Metric("accuracy", "", "Share of the images whose label the model names."),)
    sum_names = ("right",)

    def build(self):
        blocks = [nn.Sequential(nn.Conv2d(self.dim, self.dim, 3, padding=1), nn.ReLU()) for _ in range(2)]
        stem, head = nn.Conv2d(1, self.dim, 3, padding=1), nn.Linear(self.dim * self.side**2, 4)
        return nn.Sequential(stem, *blocks, nn.Flatten(), head)

    def samples(self, split):
        number, seed = {"train": (64, 0), "eval": (16, 1)}[split]
        rng = torch.Generator().manual_seed(seed)
        labels = torch.randint(4, (number,), generator=rng)
        images = torch.randn(number, 1, self.side, self.side, generator=rng)
        images[torch.arange(number), 0, labels] += 2.0
        return TensorDataset(images, labels)

    def loss(self, output, batch):
        return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])

    def sums(self, output, batch):
        return {"right": (output.argmax(1) == batch[1]).sum()}

    def measure(self, sums):
        return {"accuracy": sums["right"] / sums["count"]}
