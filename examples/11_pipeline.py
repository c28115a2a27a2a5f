"""Divide the layers of a plain module over ranks; each holds its own stage, and microbatches flow through.

python examples/11_pipeline.py
torchrun --nproc-per-node 2 examples/11_pipeline.py      two stages, the same numbers
"""

import torch
from torch import nn

import weft
from weft.env import rank_env

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*blocks), nn.Linear(32, 1))
x = torch.randn(10, 16, 8)  # 10 steps of 16 samples; all stages get the same batch


def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


place = rank_env()
plan = "pp=2 microbatches=4 schedule=zb_h1" if place and place.world_size == 2 else "accumulation=4"
with weft.init(plan) as run:
    model = run.parallelize(model)
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=1e-2)
    for rows in x:
        metrics = step((rows, rows.sum(1, keepdim=True)))
    if run.is_first:
        held = sum(p.numel() for p in model.parameters())
        print(f"loss {metrics.loss:.4f}; this rank holds {held:,} parameters under {run.plan}")
    del model, step
