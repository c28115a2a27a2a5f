"""Keep the loop that you have: forward, backward, clip, step, schedule, all in plain PyTorch.

python examples/05_own_loop.py
torchrun --nproc-per-node 2 examples/05_own_loop.py      the same numbers
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

torch.manual_seed(0)
words = torch.randint(1, 50, (128, 12))
words[::3, 8:] = 0  # padding: ranks have uneven numbers of trained tokens
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))

with weft.init("dp_shard=* zero=1") as run:
    model = run.parallelize(model)
    loader = run.shard(DataLoader(TensorDataset(words), batch_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    for epoch in range(2):
        for (ids,) in loader:
            ids = ids.to(run.device)
            logits, labels = model(ids[:, :-1]), ids[:, 1:]
            loss_sum = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum"
            )
            loss = run.global_mean(loss_sum, (labels != 0).sum())  # over the tokens of all ranks
            loss.backward()
            run.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if run.is_first:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {schedule.get_last_lr()[0]:.1e}")
    del model, optimizer, schedule
