"""Chains of blocks whose pipeline results equal one process, and chains whose results depend on the microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import weft
from tests.train.batch_kinds import (
    MEET,
    MOVES,
    NOISE,
    By,
    CallCounter,
    Capacity,
    Codebook,
    Counter,
    D,
    Frequencies,
    HandNorm,
    Kind,
    Loss,
    Recurrent,
    Routed,
    RunningMean,
    Switch,
    by_tokens,
    contrast,
    hardest,
    mean_and_one,
    noisy_loss,
    of_logits,
    squares,
    weft_noise_in_loss,
    with_variance,
)

STATE, ATTRIBUTES, WEIGHTS = "state:", "attributes:", "weights:"
BY_INPUT = "takes a gradient by a tensor that modules of earlier stages also read"


class Chain(nn.Module):
    """Four blocks; the case's module is the first or the last."""

    def __init__(self, own: nn.Module, *, last: bool = False):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList([*blocks, own] if last else [own, *blocks])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Embedded(nn.Module):
    """Map tokens through an embedding and blocks to logits with tied weights."""

    def __init__(self, own: Callable[[], nn.Module], **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(16, D, **options), nn.LayerNorm(D)
        self.blocks = nn.ModuleList([own() for _ in range(4)])
        self.head = nn.Linear(D, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed((x.abs() * 5).long() % 16)
        for block in self.blocks:
            h = h + block(self.norm(h))
        return self.head(h)[..., 0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.back = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.back(self.norm(self.conv(x.view(-1, 1, 2, 4))).relu()).flatten(1)


class Instances(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True)

    def forward(self, x):
        return self.norm(x.unflatten(1, (2, D // 2))).flatten(1)


class Remembering(nn.Module):
    """Build a table once, count calls and store the last output. None of it changes a result."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.calls, self.sizes, self.table, self.largest = 0, [], None, 0.0

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.largest = max(self.largest, float(x.detach().abs().max()) if not x.is_meta else 0.0)
        if self.table is None or self.table.device != x.device:
            self.table = torch.arange(D, dtype=x.dtype, device=x.device)
        self.last = (self.layer(x) + self.table).detach()
        return self.layer(x) + self.table


class TestTime(nn.Module):
    """Take one gradient step per sample on a loss of the input before the weights are used."""

    def __init__(self, *, shared: bool = False, grads: bool = False):
        super().__init__()
        self.fast, self.target, self.shared, self.grads = nn.Linear(D, D, bias=False), nn.Linear(D, D), shared, grads

    def forward(self, x):
        with torch.set_grad_enabled(self.grads or torch.is_grad_enabled()):
            weight = self.fast.weight if self.shared else self.fast.weight.expand(len(x), D, D)
            loss = (torch.einsum("...i,...ji->...j", x, weight) - self.target(x)).square().sum()
            (step,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.einsum("...i,...ji->...j", x, weight - 0.05 * step)


class Force(nn.Module):
    """Return the gradient of an energy with respect to its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.layer(x).tanh().square().sum(), x, create_graph=True)
        return x - force


class Gated(nn.Module):
    """Scale each sample by the gradient of a loss that is a constant for backward."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            hidden = self.layer(x).tanh()
            (gate,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
        return self.out(hidden) * gate


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(x) + weft.randn_like(x) * weft.bernoulli(x, 0.5)


class AuxLoss(nn.Module):
    """Add a penalty of its blocks to each sample's output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Penalised() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        penalties: list[Any] = [block.aux for block in self.blocks]
        return {"logits": x + torch.stack(penalties).sum(0)[:, None]}


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        self.aux = x.square().mean(1)
        return self.layer(x).tanh()


class Taught(nn.Module):
    """A frozen copy of a trained layer. momentum: the copy is an EMA that each forward updates."""

    def __init__(self, momentum: float = 1.0, *, swaps: bool = False):
        super().__init__()
        self.student, self.momentum, self.swaps = nn.Linear(D, D), momentum, swaps
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)

    def forward(self, x):
        if self.momentum < 1 and self.training:
            with torch.no_grad():
                for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.swaps:
                        mine.data = mine.data * self.momentum + its.data * (1 - self.momentum)
                    else:
                        mine.lerp_(its, 1 - self.momentum)
        return self.student(x) + self.teacher(x)


class RunningNorm(nn.Module):
    """Divide by a moving average: a buffer that is replaced or written, or an attribute."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "attribute":
            self.norm = torch.ones(D, dtype=torch.float64)
        else:
            self.register_buffer("norm", torch.ones(D))

    def forward(self, x):
        if self.training and not x.is_meta:
            with torch.no_grad():
                now = x.detach().abs().mean(0)
                if self.kind == "written":
                    self.norm.mul_(0.9).add_(0.1 * now)
                else:
                    self.norm = 0.9 * self.norm + 0.1 * now
        return x / self.norm.to(x)


class Previous(nn.Module):
    """Add the mean of the samples of the last call."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        out = x + (self.kept[-1] if self.kept and not x.is_meta else 0.0)
        if not x.is_meta:
            self.kept.append(x.detach().mean())
        return out


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = 1.0

    def forward(self, x):
        self.temperature *= 0.9
        return x / self.temperature


_CALLS = [0]


class Hidden(nn.Module):
    def forward(self, x):
        _CALLS[0] += 1
        return x * (1 + 0.01 * _CALLS[0])


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return x + noise.to(x.device)


class Lazy(nn.Module):
    """Initialize the scale from the first samples."""

    def __init__(self):
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(D)), False

    def forward(self, x):
        if not self.ready and not x.is_meta:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return x * self.scale


class Between(nn.Module):
    """Center the features between its blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x - x.mean(0))
        return x


class Albert(nn.Module):
    """One block applied several times."""

    def __init__(self, depth: int = 4):
        super().__init__()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.blocks = nn.ModuleList([block] * depth)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Reading(nn.Module):
    """Read the model's input besides the hidden states. gradient: subtract the gradient of an energy of both by it."""

    def __init__(self, gradient: Callable[..., Any] | None = None):
        super().__init__()
        self.layer, self.gradient = nn.Linear(2 * D, D), gradient

    def forward(self, h, x):
        if self.gradient is None:
            return h + self.layer(torch.cat((h, x), -1)).tanh()
        with torch.enable_grad():
            return h - self.gradient(lambda h, x: self.layer(torch.cat((h, x), -1)).square().sum(), h, x)


class Energy(nn.Module):
    """Every block reads the input; the last one takes a gradient. begins: the input needs gradients from the start."""

    def __init__(self, gradient: Callable[..., Any], *, begins: bool = True, scales: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.begins, self.scales = nn.Linear(D, D), begins, scales
        self.blocks = nn.ModuleList([*(Reading() for _ in range(3)), Reading(gradient)])

    def forward(self, x):
        h, own = self.stem(x), x.clone().requires_grad_(self.begins)
        for block in self.blocks:
            h = h * own if self.scales else h
            h = block(h, own if block.gradient is not None or not self.scales else x)
        return h


class Tied(nn.Module):
    """Map tokens to logits with tied weights, and add the gradient by the tied weight or by the head's scale."""

    def __init__(self, *, by_own: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, D)
        self.blocks = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])
        self.head = ScaledHead(self.embed.weight, by_own)

    def forward(self, x):
        h = self.embed((x.abs() * 5).long() % 16)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(h)


class ScaledHead(nn.Module):
    def __init__(self, weight: nn.Parameter, by_own: bool):
        super().__init__()
        self.weight, self.scale, self.by_own = weight, nn.Parameter(torch.ones(())), by_own

    def forward(self, h):
        with torch.enable_grad():
            logits = self.scale * F.linear(h, self.weight)
            by = self.scale if self.by_own else self.weight
            [grad] = torch.autograd.grad(logits.square().sum((1, 2)).sum(), [by], create_graph=True)
        return logits[..., 0] + (0 if self.by_own else 1) * grad.sum() / len(h)


def _by_input(energy, h, x):
    return torch.autograd.grad(energy(h, x), x, create_graph=True)[0]


def _by_unused(energy, h, x):
    found = torch.autograd.grad(energy(h, h), x, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(h) if found is None else found


def _backward(energy, h, x):
    energy(h, x).backward(inputs=[x], create_graph=True)
    return x.grad


def _backward_of_all(energy, h, x):
    torch.autograd.backward([energy(h, x)], inputs=[x], create_graph=True)
    return x.grad


def _by_edge(energy, h, x):
    return torch.autograd.grad(energy(h, x), [get_gradient_edge(x)], create_graph=True)[0]


def _by_own_copy(energy, h, x):
    return _by_input(energy, h, x.detach().requires_grad_())


def _by_next(energy, h, x):
    return _by_input(energy, h, 2 * x)


def _of_input(energy, h, x):
    return _by_input(energy, x, x)


def _with_begin(energy, h, x):
    return _by_input(energy, h, x.requires_grad_())


def chain(build: Callable[..., nn.Module], *given: Any, last: bool = False, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Chain(build(*given, **options), last=last)


def by(function: Callable[[torch.Tensor], torch.Tensor], *, last: bool = False) -> Callable[[], nn.Module]:
    return lambda: Chain(By(function), last=last)


#: Equal to one process, without a warning.
LEGAL: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gelu": (chain(nn.GELU), squares),
    "layer norm": (chain(nn.LayerNorm, D, last=True), squares),
    "dropout": (chain(nn.Dropout, 0.5), squares),
    "softmax over features": (by(lambda x: x.softmax(-1) * x.sort(-1).values), squares),
    "branch by sample": (by(lambda x: torch.where(x.sum(1, keepdim=True) > 0, x, 2 * x)), squares),
    "group norm": (chain(Grouped), squares),
    "instance norm": (chain(Instances, last=True), squares),
    "recurrent": (chain(Recurrent), squares),
    "routed": (chain(Routed), squares),
    "remembering": (chain(Remembering), squares),
    "remembering at the end": (chain(Remembering, last=True), squares),
    "weft noise": (chain(Noisy), squares),
    "weft noise in the loss": (chain(nn.GELU), weft_noise_in_loss),
    "tied attention": (lambda: Embedded(Attention), squares),
    "inner gradient": (chain(TestTime, grads=True), squares),
    "inner gradient at the end": (chain(TestTime, grads=True, last=True), squares),
    "inner gradient as it trains": (chain(TestTime), squares),
    "force": (chain(Force, last=True), squares),
    "gated by a gradient": (chain(Gated), squares),
    "force of the hidden states": (
        lambda: Energy(lambda energy, h, x: _by_input(lambda x, h: energy(h, x), x, h)),
        squares,
    ),
    "gradient by an own copy": (lambda: Energy(_by_own_copy), squares),
    "gradient by a later tensor": (lambda: Energy(_by_next), squares),
    "gradient of the input alone": (lambda: Energy(_of_input), squares),
    "gradient beside a tied weight": (lambda: Tied(by_own=True), squares),
    "aux loss": (AuxLoss, of_logits),
    "frozen teacher": (chain(Taught), squares),
    "ragged counts": (chain(nn.GELU), by_tokens),
    "one block many times": (Albert, squares),
}

#: Reported by a warning or an error.
INTERACTING: dict[str, Kind] = {
    "centred": Kind(by(lambda x: x - x.mean(0)), MEET, "blocks.0"),
    "centred at the end": Kind(by(lambda x: x - x.mean(0), last=True), MEET, "blocks.3"),
    "softmax over samples": Kind(by(lambda x: x.softmax(0)), MEET, "blocks.0"),
    "sorted": Kind(by(lambda x: x.sort(0).values, last=True), MEET, "blocks.3"),
    "between blocks": Kind(Between, MEET),
    "capacity": Kind(chain(Capacity), MEET, "blocks.0"),
    "own batch norm": Kind(chain(HandNorm), MEET, "blocks.0"),
    "inner gradient of all samples": Kind(chain(TestTime, shared=True), MEET, "blocks.0"),
    "gradient by the input": Kind(lambda: Energy(_by_input), BY_INPUT, "blocks.3"),
    "gradient by an unused input": Kind(lambda: Energy(_by_unused), BY_INPUT, "blocks.3"),
    "backward to the input": Kind(lambda: Energy(_backward), BY_INPUT, "blocks.3"),
    "backward function to the input": Kind(lambda: Energy(_backward_of_all), BY_INPUT, "blocks.3"),
    "gradient by an edge": Kind(lambda: Energy(_by_edge), BY_INPUT, "blocks.3"),
    "gradient by a tied weight": Kind(Tied, BY_INPUT, "head"),
    "input that begins to need a gradient": Kind(lambda: Energy(_with_begin, begins=False), BY_INPUT, "blocks.3"),
    "gradient by a scale between blocks": Kind(lambda: Energy(_by_input, scales=True), BY_INPUT, "blocks.3"),
    "its buffer": Kind(chain(HandNorm, last=True), MOVES, "blocks.3.mean"),
    "running mean": Kind(chain(RunningMean), MOVES, "blocks.0.mean"),
    "codebook": Kind(chain(Codebook, last=True), MOVES, "blocks.3.codes"),
    "running norm": Kind(chain(RunningNorm, "written"), MOVES, "blocks.0.norm"),
    "replaced running norm": Kind(chain(RunningNorm, "replaced", last=True), MOVES, "blocks.3.norm"),
    "running norm in an attribute": Kind(chain(RunningNorm, "attribute"), ATTRIBUTES, "blocks.0.norm"),
    "counter": Kind(chain(Counter), MOVES, "blocks.0.steps"),
    "counter in an attribute": Kind(chain(CallCounter, last=True), ATTRIBUTES, "blocks.3.calls"),
    "annealed": Kind(chain(Annealed), ATTRIBUTES, "blocks.0.temperature"),
    "previous samples": Kind(chain(Previous, last=True), ATTRIBUTES, "blocks.3.kept"),
    "teacher": Kind(chain(Taught, 0.9), WEIGHTS, "blocks.0.teacher.weight"),
    "swapped teacher": Kind(chain(Taught, 0.9, swaps=True, last=True), WEIGHTS, "blocks.3.teacher.weight"),
    "scale of the first samples": Kind(chain(Lazy), WEIGHTS, "blocks.0.scale"),
    "hidden counter": Kind(chain(Hidden), STATE, "blocks.0"),
    "randn_like": Kind(by(lambda x: x + torch.randn_like(x)), NOISE, "blocks.0 draws"),
    "random mask at the end": Kind(by(lambda x: x * (torch.rand_like(x) > 0.3), last=True), NOISE, "blocks.3 draws"),
    "dropout of a function": Kind(by(lambda x: F.dropout(x, 0.5)), NOISE, "blocks.0 draws"),
    "own generator": Kind(chain(OwnGenerator), NOISE, "blocks.0 draws"),
    "Python's generator": Kind(chain(Switch), NOISE, "blocks.0 draws"),
    "noise in the loss": Kind(chain(nn.GELU), NOISE, "loss_fn", noisy_loss),
    "contrastive": Kind(chain(nn.GELU), "loss_fn:", loss=contrast),
    "mean and 1": Kind(chain(nn.GELU), "loss_fn: the number", loss=mean_and_one),
    "spread": Kind(chain(nn.GELU), "loss_fn:", loss=with_variance),
    "hardest": Kind(chain(nn.GELU), "loss_fn:", loss=hardest),
    "frequencies": Kind(chain(Frequencies, False), "scale_grad_by_freq=True"),
    "frequencies of a function": Kind(chain(Frequencies, True, last=True), "scale_grad_by_freq=True"),
}
