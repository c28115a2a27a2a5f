"""Private training under a plan, and the same steps as a plain loop over single samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.adapters import add_adapter
from weft.models.decoder import Decoder
from weft.privacy.draws import drawn, some_of
from weft.privacy.keys import read_key
from weft.privacy.noise import noise_at
from weft.privacy.settings import Privacy

RECORDS, TOKENS, VOCAB, KEY = 60, 6, 13, "test:1"
LIMIT = 1e-10


@dataclass(frozen=True)
class PrivateCase:
    """One run. `noise` 0 leaves noise out, for a comparison of the clipped sums alone. most: records of a user."""

    model: str
    plan: str = ""
    noise: float = 0.7
    steps: int = 2
    batch: int = 6
    clip: float = 0.5
    passes: int = 0
    by_user: bool = False
    most: int = 0


class Net(nn.Module):
    """Embedding, convolution, norms and linear layers, with a tied head if `tied`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.signal = nn.Conv1d(8, 8, 3, padding=1)
        self.norm, self.mid = nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x + self.signal(x.mT).mT
        return self.head(torch.tanh(self.mid(self.norm(x))) * self.scale)


def decoder(**options: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
    return Decoder(DecoderSpec(**{**sizes, "max_seq_len": 16, **options}))


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    makers = {
        "net": Net,
        "decoder": decoder,
        "tied": lambda: decoder(tied=True),
        "gpt2": lambda: decoder(family="gpt2"),
        "experts": lambda: decoder(num_experts=4, top_k=2, expert_ffn_dim=12, balance="none"),
        "lora": lambda: add_adapter(decoder(), rank=2, alpha=4.0),
    }
    model = makers[kind]().double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64) * 0.3)
    return model


def users() -> np.ndarray:
    """Return the user of each record: 8 users with 1, 3, 5, ... and 11 records."""
    return np.floor(np.sqrt(np.arange(RECORDS))).astype(np.int64)


def records() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (RECORDS, TOKENS + 1), generator=random)
    labels = ids[:, 1:].clone()
    labels[::3, :2] = -100
    return list(zip(ids[:, :-1], labels, users().tolist(), strict=True))


def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch[1]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


def settings(case: PrivateCase) -> Privacy:
    unit = {"unit": "2", "unit_records": case.most} if case.by_user else {}
    return Privacy(
        8 if case.by_user else RECORDS, case.batch, case.steps, delta=1e-3, noise=max(case.noise, 1e-9),
        clip=case.clip, key=KEY, passes=case.passes, **unit,
    )  # fmt: skip


def script(case: PrivateCase, optimizer: Any = torch.optim.AdamW) -> tuple[Any, nn.Module, Any]:
    plan = Plan.parse(f"{case.plan} precision=fp64".strip())
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(make(case.model))
    step = run.train_step(
        model, optimizer, loss_fn, lr=1e-2, privacy=settings(case), forward=lambda model, batch: model(batch[0])
    )
    return run, model, step


def train(case: PrivateCase) -> dict[str, torch.Tensor]:
    """Train under the plan. Return the full weights."""
    run, model, step = script(case)
    if not case.noise:
        step.privacy.add_noise = lambda factor: step.privacy.ledger.add()
    for batch in run.private_batches(records(), step):
        step(batch)
    return {name: tensor.clone() for name, tensor in run.full_state_dict(model, everywhere=True).items()}


def plain(case: PrivateCase) -> dict[str, torch.Tensor]:
    """Train by a loop over single samples, or single users. Return the weights."""
    model, data, key = make(case.model), records(), read_key(KEY)
    units = [np.flatnonzero(users() == user) for user in range(8)] if case.by_user else np.arange(RECORDS)[:, None]
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-2)
    for step in range(case.steps):
        sums = {name: torch.zeros_like(param) for name, param in named}
        for unit in drawn(key, step, len(units), case.batch / len(units)).tolist():
            losses: list[torch.Tensor] = []
            for index in some_of(key, step, unit, units[unit], case.most):
                ids, labels = (one[None] for one in data[index][:2])
                total, count = loss_fn(model(ids), (ids, labels))
                losses.append(total / count)
            grads = torch.autograd.grad(torch.stack(losses).mean(), [param for _, param in named])
            norm = sum(float(grad.square().sum()) for grad in grads) ** 0.5
            for (name, _), grad in zip(named, grads, strict=True):
                sums[name] += grad * min(1.0, case.clip / norm)
        for name, param in named:
            every = noise_at(key, step, name, np.arange(param.numel())).reshape(param.shape)
            param.grad = (sums[name] + case.noise * case.clip * torch.from_numpy(every).double()) / case.batch
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def difference(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert list(found) == list(want)
    return max(float((found[name] - one).abs().max()) for name, one in want.items())
