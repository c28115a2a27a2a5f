"""Save while you train, and go on where you were: the first start and every resume are the same lines.

python examples/04_save_and_resume.py
torchrun --nproc-per-node 2 examples/04_save_and_resume.py      goes on from what one process saved; the reverse too
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

FOLDER = Path(tempfile.gettempdir()) / "weft_example_04"  # all ranks must see it
x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))


def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


torch.manual_seed(0)
with weft.init("dp_shard=* zero=2") as run:
    model = run.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    loader = run.shard(DataLoader(data, batch_size=32, shuffle=True))
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=1e-2)
    found = run.load(FOLDER, model=model, optimizer=step, loader=loader)
    done = found.step if found else 0
    print(f"rank {run.mesh.rank}: {'goes on' if found else 'starts'} at step {done}")
    while done < 16:
        for batch in loader:  # an epoch, or what is left of one
            metrics = step(batch)
            done += 1
            if done % 4 == 0:
                path = run.save(FOLDER, step=done, model=model, optimizer=step, loader=loader, keep=2)
                if run.is_first:
                    print(f"step {done}: loss {metrics.loss:.4f}, saved in {path}")
    del model, step
