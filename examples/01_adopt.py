"""Adopt Weft in a script of your own: six lines, any plain module, any DataLoader.

python examples/01_adopt.py
torchrun --nproc-per-node 2 examples/01_adopt.py      the same numbers, on two ranks
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(0)
images = torch.randn(512, 1, 8, 8)
classes = images.mean(dim=(1, 2, 3)).mul(40).long().clamp(-2, 2) + 2
loader = DataLoader(TensorDataset(images, classes), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5))


def loss_fn(output, batch):
    """The sum of the losses and how many there are: Weft divides once, by the count over all ranks."""
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


run = weft.init("dp_replicate=*")
model = run.parallelize(model)
loader = run.shard(loader)
step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=3e-3)
for _ in range(5):
    for batch in loader:
        metrics = step(batch)
    if run.is_first:
        print(f"loss {metrics.loss:.4f}  gradient norm {metrics.grad_norm:.3f}")
del step, model
run.close()
