"""Models and losses whose results depend on how a batch is split, and ordinary ones that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import weft

D = 8
Loss = Callable[[Any, Any], tuple[torch.Tensor, Any]]


def squares(output, batch):
    return (output - batch[1]).square().sum(), len(output)


class Net(nn.Module):
    """Two linear layers with a module between them."""

    def __init__(self, between: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.between, self.down = nn.Linear(D, D), between, nn.Linear(D, D)

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class By(nn.Module):
    """Apply a function to the features, as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else x


class HandNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


class RunningMean(nn.Module):
    """Update a buffer from the batch without using it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x


class Codebook(nn.Module):
    """Vector quantization whose entries are updated from the samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, D, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes.to(x)).argmin(1)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.01 * x.to(self.codes))
        return x + (self.codes.to(x)[nearest] - x).detach()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x * (1 + 0.1 * self.steps.to(x))


class CallCounter(nn.Module):
    """Count calls in Python and cache a computed value."""

    def __init__(self):
        super().__init__()
        self.calls, self.width = 0, 0

    def forward(self, x):
        self.calls += 1
        self.width = self.width or x.shape[-1]
        return x * (1 + 0.1 * self.calls)


class Capacity(nn.Module):
    """Expert that takes only one of the tokens that choose it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 1)
        self.experts = nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), x
        for index, expert in enumerate(self.experts):
            first = (chosen == index).nonzero()[:1, 0]
            out = out.index_add(0, first, expert(x[first]))
        return out


class Frequencies(nn.Module):
    def __init__(self, functional: bool):
        super().__init__()
        self.functional = functional
        self.table = nn.Embedding(4, D, scale_grad_by_freq=not functional)

    def forward(self, x):
        index = (x[:, 0] > 0).long()
        if self.functional:
            return x + F.embedding(index, self.table.weight, None, None, 2.0, True)
        return x + self.table(index)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, D, max_norm=0.5)

    def forward(self, x):
        return x + self.table((x[:, 0] > 0).long())


class Switch(nn.Module):
    """Skip a layer at random, drawn from Python's generator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return x + self.layer(x) * random.random()


class Shared(nn.Module):
    """Attention over the batch dim."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]  # (samples, features): samples are taken for tokens


class BySize(nn.Module):
    def forward(self, x):
        return x / len(x)


def contrast(output, batch):
    scores = F.normalize(output, dim=-1) @ F.normalize(batch[1], dim=-1).t()
    return F.cross_entropy(scores, torch.arange(len(output)), reduction="sum"), len(output)


def mean_and_one(output, batch):
    return (output - batch[1]).square().mean(), 1


def mean_and_number(output, batch):
    return (output - batch[1]).square().mean(), len(output)


def with_variance(output, batch):
    return squares(output, batch)[0] + output.var(0).sum(), len(output)


def with_constant(output, batch):
    return squares(output, batch)[0] + 0.5, len(output)


def noisy_loss(output, batch):
    return (output - batch[1] + torch.randn_like(output)).square().sum(), len(output)


def hardest(output, batch):
    losses = (output - batch[1]).square().sum(1)
    return losses.topk(max(1, len(losses) // 2)).values.sum() + losses.max(), len(losses)


@dataclass(frozen=True)
class Kind:
    """said: part of the warning or error. where: module it names, or an empty string."""

    build: Callable[[], nn.Module]
    said: str
    where: str = ""
    loss: Loss = squares


def net(function: Callable[[torch.Tensor], torch.Tensor], said: str, where: str = "between") -> Kind:
    return Kind(lambda: Net(By(function)), said, where)


MEET, NOISE, MOVES = "depends on the other samples", "random numbers:", "buffers:"

DEPENDENT: dict[str, Kind] = {
    # Operations that mix samples.
    "centred": net(lambda x: x - x.mean(0), MEET),
    "standardised": Kind(lambda: Net(HandNorm()), MEET, "between"),
    "batch_norm function": net(lambda x: F.batch_norm(x, None, None, training=True), MEET),
    "largest of the batch": net(lambda x: x / x.abs().amax(0), MEET),
    "softmax over samples": net(lambda x: x.softmax(0), MEET),
    "sorted": net(lambda x: x.sort(0).values, MEET),
    "rolled": net(lambda x: x + x.roll(1, 0), MEET),
    "cumulative": net(lambda x: x.cumsum(0), MEET),
    "gram": net(lambda x: x + (x @ x.t()).softmax(-1) @ x, MEET),
    "mixup": net(lambda x: 0.9 * x + 0.1 * x.flip(0), MEET),
    "minibatch deviation": net(lambda x: x + x.std(0).mean(), MEET),
    "by size": Kind(lambda: Net(BySize()), MEET, "between"),
    "attention over samples": Kind(lambda: Net(Shared()), MEET, "between.attention"),
    "capacity": Kind(lambda: Net(Capacity()), MEET, "between"),
    "outside of modules": Kind(lambda: Whitened(), MEET),
    # Losses.
    "contrastive": Kind(lambda: Net(nn.GELU()), "loss_fn:", loss=contrast),
    "mean and 1": Kind(lambda: Net(nn.GELU()), "loss_fn: the number", loss=mean_and_one),
    "mean and number": Kind(lambda: Net(nn.GELU()), "loss_fn:", loss=mean_and_number),
    "spread": Kind(lambda: Net(nn.GELU()), "loss_fn:", loss=with_variance),
    "constant": Kind(lambda: Net(nn.GELU()), "loss_fn:", loss=with_constant),
    "hardest": Kind(lambda: Net(nn.GELU()), "loss_fn:", loss=hardest),
    "noisy loss": Kind(lambda: Net(nn.GELU()), NOISE, "loss_fn", noisy_loss),
    # Noise.
    "randn_like": net(lambda x: x + torch.randn_like(x), NOISE),
    "rand": net(lambda x: x * torch.rand(len(x), 1), NOISE),
    "normal_": net(lambda x: x + torch.empty_like(x).normal_(), NOISE),
    "bernoulli": net(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), NOISE),
    "random mask": net(lambda x: x * (torch.rand_like(x).argsort(-1) < D // 2), NOISE),
    "times of diffusion": net(lambda x: x * torch.randint(1, 1000, (len(x), 1)), NOISE),
    "permuted features": net(lambda x: x[:, torch.randperm(D)], NOISE),
    # Dropout of full rows of a 2-d input, by position.
    "channel dropout": Kind(lambda: Net(nn.Dropout1d(0.5)), MEET, "between"),
    "dropout of a function": net(lambda x: F.dropout(x, 0.5), NOISE),
    "gumbel": net(lambda x: F.gumbel_softmax(x), NOISE),
    "rrelu": Kind(lambda: Net(nn.RReLU()), NOISE, "between"),
    "Python's generator": Kind(lambda: Net(Switch()), NOISE, "between"),
    # State.
    "running mean": Kind(lambda: Net(RunningMean()), MOVES, "between.mean"),
    "codebook": Kind(lambda: Net(Codebook()), MOVES, "between.codes"),
    "instance norm": Kind(lambda: Net(Instance()), MOVES, "between.norm.running_mean"),
    "frequencies": Kind(lambda: Net(Frequencies(False)), "scale_grad_by_freq=True"),
    "frequencies of a function": Kind(lambda: Net(Frequencies(True)), "scale_grad_by_freq=True"),
}


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.up(x)
        return self.down(h - h.mean(0))


class Instance(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, D // 2))).flatten(1)


class Tokens(nn.Module):
    """Treat features as tokens, with attention between them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layer(self.embed(x[..., None])))[..., 0]


class Flattened(nn.Module):
    """Flatten (samples, tokens) to rows of one matrix."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        rows = x.reshape(-1, 2)
        return self.down(self.up(rows).relu()).reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0])[..., 0]


class Routed(nn.Module):
    """Route each sample to its own expert."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        weight, out = self.router(x).softmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (weight.argmax(-1) == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, index, None])
        return out


class Cached(nn.Module):
    """Build a table once, store the last output and count calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.outputs, self.table = 0, [], None

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(D, dtype=x.dtype)
        self.last = x + self.table
        self.outputs.append(len(x))
        return self.last


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, D)

    def forward(self, x):
        return self.head(self.norm(self.conv(x.view(-1, 1, 2, 4))).relu().mean((2, 3)))


class WithDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return {"logits": self.layer(x), "loss": None, "hidden": (x, [x.sum(1)]), "scale": torch.tensor(2.0)}


class WeftNoise(nn.Module):
    def forward(self, x):
        return x + weft.randn_like(x) * weft.bernoulli(x, 0.5)


class Fixed(nn.Module):
    """Written for microbatches of one size; fails for any other."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.layer = rows, nn.Linear(D, D)

    def forward(self, x):
        return self.layer(x).view(self.rows, D)


def of_logits(output, batch):
    return squares(output["logits"], batch)


def weft_noise_in_loss(output, batch):
    return (output - batch[1] + weft.rand_like(output)).square().sum(), len(output)


def by_tokens(output, batch):
    weights = (batch[1] > 0).to(output)
    return ((output - batch[1]).square() * weights).sum(), weights.sum()


def classes(output, batch):
    return F.cross_entropy(output, batch[1].argmax(1), reduction="sum"), len(output)


ORDINARY: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "mlp": (lambda: Net(nn.GELU()), squares),
    "layer norm": (lambda: Net(nn.LayerNorm(D)), squares),
    "dropout": (lambda: Net(nn.Dropout(0.5)), squares),
    "frozen batch norm": (lambda: Net(nn.BatchNorm1d(D).eval()), squares),
    "residual": (lambda: Net(By(lambda x: x + x.relu())), squares),
    "softmax over features": (lambda: Net(nn.Softmax(-1)), squares),
    "attention": (Tokens, squares),
    "flattened": (Flattened, squares),
    "recurrent": (Recurrent, squares),
    "routed": (lambda: Net(Routed()), squares),
    "cached": (lambda: Net(Cached()), squares),
    "images": (Images, squares),
    "dict": (WithDict, of_logits),
    "weft noise": (lambda: Net(WeftNoise()), squares),
    "weft noise in the loss": (lambda: Net(nn.GELU()), weft_noise_in_loss),
    "ragged counts": (lambda: Net(nn.GELU()), by_tokens),
    "classes": (lambda: Net(nn.GELU()), classes),
    "group loss": (
        lambda: Net(nn.GELU()),
        weft.group_loss(2)(lambda own, group, places: group_sum(own, group, places)),
    ),
    "instance norm": (lambda: Net(InstanceWithout()), squares),
    "buffers that stay": (lambda: Net(Table()), squares),
    "unused noise": (lambda: Net(By(lambda x: x + 0 * torch.rand(()))), squares),
    "large and small": (lambda: Net(By(lambda x: x * torch.logspace(-6, 6, D, dtype=x.dtype))), squares),
    "constants": (lambda: Net(By(torch.zeros_like)), squares),
}


def group_sum(own, group, places):
    scores = own[0] @ group[0].t()
    return F.cross_entropy(scores, places, reduction="sum"), len(places)


class InstanceWithout(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2)

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, D // 2))).flatten(1)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(D))

    def forward(self, x):
        self.table.fill_(1.0)  # written with the same values
        return x * self.table
