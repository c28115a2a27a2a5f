"""A small model with a case's code, under tp and sp, compared with one process in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError
from weft.parallel.parallelize import Application, shard
from weft.parallel.state.placement import WHOLE

DIM, VOCAB, TOKENS, HEAD = 16, 11, 8, 4
#: Tolerance of a comparison with one process, relative to the maximum.
EQUAL = 1e-10


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, inside=None):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.inside = inside

    def forward(self, x):
        h = F.gelu(self.up(x))
        return self.down(h if self.inside is None else self.inside(self, h))


class Block(nn.Module):
    """Transformer block. first: applied to its input. inside: applied between the feed-forward layers."""

    def __init__(self, first=None, inside=None, add: Callable[[nn.Module], None] | None = None):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.ff = Attention(), FeedForward(inside)
        self.first = first
        if add is not None:
            add(self)

    def forward(self, x, *others):
        if self.first is not None:
            x = self.first(self, x, *others)
        x = x + self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class Net(nn.Module):
    """Model of blocks. between: applied between blocks. loop: replaces the loop over the blocks."""

    def __init__(self, first=None, inside=None, between=None, loop=None, add=None, add_block=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(first, inside, add_block) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)
        self.between, self.loop = between, loop
        if add is not None:
            add(self)

    def forward(self, ids):
        x = self.embed(ids)
        if self.loop is not None:
            x = self.loop(self, x)
        else:
            for number, block in enumerate(self.blocks):
                x = block(x)
                if self.between is not None and number == 0:
                    x = self.between(self, x)
        return self.head(self.norm(x))


def ids_batch() -> torch.Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(5))


def outcome(plan: str, build: Callable[[], nn.Module], batch: Any = None, example: Any = None) -> str:
    """Return "equal", "differs ..." or "refused ..." for a model under a plan, on this rank."""
    torch.manual_seed(3)
    model = build().double()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    batch = ids_batch() if batch is None else batch
    inputs = batch if isinstance(batch, tuple) else (batch,)
    other = copy.deepcopy(model)
    torch.manual_seed(11)
    expected = _loss(model(*inputs))
    expected.backward()
    mesh = build_mesh(Plan.parse(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            placements = shard(Application(other, mesh, example=example))
        except WeftError as error:
            return f"refused {error}"
    torch.manual_seed(11)
    try:
        found = _loss(other(*inputs))
        found.backward()
    except WeftError as error:
        return f"refused {error}"
    worst = {"loss": abs(float(found.detach() - expected.detach())) / abs(float(expected.detach()))}
    tp = mesh["tp"]
    grads = {name: param.grad for name, param in model.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for name, param in other.named_parameters():
        reference, placement = grads[name], placements.get(name, WHOLE)
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if placement.cut:
            grad = placement.join(list(all_gather(grad.contiguous(), tp).view(tp.size, *param.shape)))
        elif placement.partial:
            grad = all_reduce(grad.clone(), tp)
        reference = torch.zeros_like(grad) if reference is None else reference
        worst[name] = float((grad - reference).abs().max()) / max(float(reference.abs().max()), 1e-3 * scale)
    where = max(worst, key=lambda name: worst[name])
    num_sharded = sum(bool(placement.cut) for placement in placements.values())
    return f"equal {num_sharded}" if worst[where] < EQUAL else f"differs {where} {worst[where]:.2g}"


def _loss(output: Any) -> torch.Tensor:
    """Return a sum with different weights, so that no symmetry hides a difference."""
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    return (output.log_softmax(-1) * weights).sum() if output.dim() > 1 else (output * weights).sum()


def outcomes(plan: str, names: list[str], table: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of each case. table: keyword arguments of `Net` by name, or a function that builds a model."""
    found: dict[str, str] = {}
    for name in names:
        case = table[name]
        build = case if callable(case) else lambda case=case: Net(**case)
        try:
            found[name] = outcome(plan, build)
        except Exception as error:  # a crash is reported as an outcome
            found[name] = f"crashed {type(error).__name__}: {error}"
    return found
