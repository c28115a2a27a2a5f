"""Scripts that train models with random numbers, using each of torch's dropout APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan

RATE, WIDTH, TOKENS = 0.3, 16, 4


def dropped(x: Tensor, training: bool) -> Tensor:
    """Dropout in a helper function outside any module."""
    return F.dropout(x, 0.3, training)


class Helped(nn.Module):
    """Call a function that applies dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return dropped(self.layer(x), self.training)


class Attends(nn.Module):
    """Attention by torch's function, with the rate under another attribute name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(WIDTH, WIDTH), {"attention": RATE}

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).view(*x.shape[:2], 2, -1).transpose(1, 2)
        rate = self.settings["attention"] if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=rate).transpose(1, 2).flatten(2)


class AttendsOneHead(nn.Module):
    """Attention without a head dim, and in-place dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.p_attn = nn.Linear(WIDTH, WIDTH), RATE

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)
        F.dropout(q, 0.2, self.training, inplace=True)
        return F.scaled_dot_product_attention(q, q, q, None, self.p_attn if self.training else 0.0)


class SelfAttends(nn.Module):
    """nn.MultiheadAttention. needs: return its weights, which makes torch compute attention step by step."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.attention, self.needs = nn.MultiheadAttention(WIDTH, 2, dropout=RATE, batch_first=True), needs

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.needs)[0]


class TokensFirst(nn.Module):
    """torch's encoder in its default layout, (tokens, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=RATE)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


class Decodes(nn.Module):
    """torch's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=RATE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype)
        return self.decoder(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


class Recurs(nn.Module):
    """Recurrent network with dropout between layers. packed: sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool = True, packed: bool = False) -> None:
        super().__init__()
        self.net = kind(WIDTH, WIDTH, num_layers=3, dropout=RATE, batch_first=batch_first, bidirectional=True)
        self.out, self.batch_first, self.packed = nn.Linear(2 * WIDTH, WIDTH), batch_first, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            lengths = torch.tensor([1 + int(97 * value) % TOKENS for value in x[:, 0, 0].abs().tolist()])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=TOKENS)
        elif self.batch_first:
            out = self.net(x)[0]
        else:
            out = self.net(x.transpose(0, 1))[0].transpose(0, 1)
        return self.out(out)


class Channels(nn.Module):
    """Dropout of channels, or dropout that preserves mean and variance."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop, self.layer = drop, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x).transpose(1, 2)).transpose(1, 2)


class Noisy(nn.Module):
    """Noise from the generators of torch, numpy and Python."""

    def forward(self, x: Tensor) -> Tensor:
        import random

        import numpy as np

        return x + 0.3 * torch.randn_like(x) + 0.1 * float(np.random.rand()) + 0.1 * random.random()


class Samples(nn.Module):
    """Noise per sample as models use it: VAE, stochastic depth, random choices."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.7) * (torch.rand(len(x), 1, 1) < 0.9)
        chosen = F.gumbel_softmax(x, hard=False)
        steps = torch.randint(0, 10, (len(x),))[:, None, None] + torch.randint(3, (len(x), 1, 1))
        latent = torch.distributions.Normal(x, 0.5).rsample()
        return latent * kept + chosen + 0.01 * steps + torch.randn_like(x) * torch.empty_like(x).uniform_(-0.1, 0.3)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "helped": Helped,
    "attends": Attends,
    "one head": AttendsOneHead,
    "multi-head": lambda: SelfAttends(False),
    "multi-head with weights": lambda: SelfAttends(True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=RATE, batch_first=True),
    "tokens first": TokensFirst,
    "decoder layer": Decodes,
    "lstm": lambda: Recurs(nn.LSTM),
    "packed lstm": lambda: Recurs(nn.LSTM, packed=True),
    "gru": lambda: Recurs(nn.GRU, batch_first=False),
    "packed gru": lambda: Recurs(nn.GRU, packed=True),
    "rnn": lambda: Recurs(nn.RNN),
    "dropout1d": lambda: Channels(nn.Dropout1d(RATE)),
    "alpha dropout": lambda: Channels(nn.AlphaDropout(RATE)),
    "feature alpha dropout": lambda: Channels(nn.FeatureAlphaDropout(RATE)),
    "noise of samples": Samples,
    "noise": Noisy,
}


class Net(nn.Module):
    """Two linear layers around two blocks that use random numbers."""

    def __init__(self, name: str):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(KINDS[name]() for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.arange(1, TOKENS + 1, dtype=x.dtype, device=x.device)
        y = self.first(x)[:, None] * scale[:, None]
        for block in self.blocks:
            y = block(y)
        return self.last(y.mean(1))


def start(plan_text: str) -> weft.Run:
    plan = Plan.parse(plan_text)
    return weft.Run(plan, build_mesh(plan), Ledger(), seed=0)


def loss_fn(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["labels"], reduction="sum"), output.numel()


def train(
    plan: str, name: str, steps: int = 4, *, folder: str = "", save_at: int = 0, own_loop: bool = False
) -> list[float]:
    """Return the losses of the remaining steps. folder: resume from it. save_at: save to it and stop there."""
    run = start(f"{plan} precision=fp64")
    torch.manual_seed(0)
    x = torch.randn(24, 8, dtype=torch.float64)
    rows = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
    loader = run.shard(DataLoader(rows, batch_size=8))
    model = run.parallelize(Net(name).double())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = None if own_loop else run.train_step(model, optimizer, loss_fn)
    keeps = {"model": model, "optimizer": step or optimizer, "loader": loader}
    loaded = run.load(folder, **keeps) if folder and not save_at else None
    done, losses = loaded.step if loaded else 0, []
    while done < steps:
        for batch in loader:
            before = torch.get_rng_state()
            if step is not None:
                losses.append(float(step(batch).loss))
            else:
                loss = run.global_mean(*loss_fn(model(batch["x"]), batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert torch.equal(
                torch.get_rng_state(), before
            )  # the script's own random numbers are unaffected by the model
            done += 1
            if done == save_at:
                run.save(folder, step=done, **keeps)
                return losses
            if done == steps:
                break
    return losses


def train_all(plan: str, names: list[str], **options: Any) -> dict[str, list[float]]:
    return {name: train(plan, name, **options) for name in names}
