"""Two towers of embeddings and a product: clicks of users on items. Large tables are what ZeRO shards.

python examples/10_recommender.py
torchrun --nproc-per-node 2 examples/10_recommender.py      each rank holds half of the tables and of AdamW's states
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import weft

USERS, ITEMS = 1000, 2000


class Towers(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.user_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.item_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, user, item):
        return (self.user_tower(self.users(user)) * self.item_tower(self.items(item))).sum(-1)


def loss_fn(scores, batch):
    return nn.functional.binary_cross_entropy_with_logits(scores, batch["clicked"], reduction="sum"), len(scores)


torch.manual_seed(0)
user, item = torch.randint(USERS, (4096,)), torch.randint(ITEMS, (4096,))
rows = [{"user": u, "item": i, "clicked": ((u + i) % 3 == 0).float()} for u, i in zip(user, item, strict=True)]

with weft.init("dp_shard=* zero=3") as run:
    model = run.parallelize(Towers())
    loader = run.shard(DataLoader(rows, batch_size=256))  # dicts: the model gets `user` and `item` by name
    step = run.train_step(
        model, torch.optim.AdamW, loss_fn, lr=1e-2, forward=lambda model, batch: model(batch["user"], batch["item"])
    )
    for epoch in range(2):
        for batch in loader:
            metrics = step(batch)
        if run.is_first:
            print(f"epoch {epoch}: loss {metrics.loss:.4f}")
    del model, step
