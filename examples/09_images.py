"""A small residual network on images, with recompute and activations on the host: less memory, the same numbers.

python examples/09_images.py
torchrun --nproc-per-node 2 examples/09_images.py      the same numbers, on two ranks
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


class Block(nn.Module):
    """GroupNorm looks at one sample at a time, so its numbers do not depend on how a batch is cut."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.norm(x).relu())


class Net(nn.Module):
    def __init__(self, width: int = 16, num_blocks: int = 4, num_classes: int = 5):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


torch.manual_seed(0)
images = torch.randn(256, 1, 8, 8)
classes = images.mean((1, 2, 3)).mul(20).long().clamp(-2, 2) + 2
with weft.init("dp_shard=* zero=2 recompute=full offload=activations:0.5") as run:
    model = run.parallelize(Net())
    loader = run.shard(DataLoader(TensorDataset(images, classes), batch_size=32, shuffle=True))
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=3e-3)
    for batch in loader:
        metrics = step(batch)
    if run.is_first:
        print(f"loss {metrics.loss:.4f}")
    del model, step
