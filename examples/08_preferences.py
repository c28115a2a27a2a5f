"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) by `forward=` and a loss of your own.

python examples/08_preferences.py
torchrun --nproc-per-node 2 examples/08_preferences.py      the same numbers
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

BETA = 0.1
torch.manual_seed(0)
chosen, rejected = torch.randint(64, (2, 64, 12))
policy = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
reference = copy.deepcopy(policy).requires_grad_(False)


def log_prob(model, ids):
    """Of each sequence, the log-probability of its tokens after the first."""
    logits = model(ids[:, :-1]).log_softmax(-1)
    return logits.gather(2, ids[:, 1:, None]).sum((1, 2))


def forward(model, batch):
    """The policy sees both answers in one call."""
    good, bad = log_prob(model, torch.cat(batch)).chunk(2)
    with torch.no_grad():
        good_before, bad_before = log_prob(reference, torch.cat(batch)).chunk(2)
    return BETA * ((good - good_before) - (bad - bad_before))


def loss_fn(margins, batch):
    return -nn.functional.logsigmoid(margins).sum(), len(margins)


with weft.init("dp_shard=* zero=2") as run:
    reference.to(run.device)
    model = run.parallelize(policy)
    loader = run.shard(DataLoader(TensorDataset(chosen, rejected), batch_size=16))
    step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=3e-3, forward=forward)
    for epoch in range(3):
        for batch in loader:
            metrics = step(batch)
        if run.is_first:
            print(f"epoch {epoch}: loss {metrics.loss:.4f}")
    del model, step
