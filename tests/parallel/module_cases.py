"""Hand-written blocks: some treat tokens separately outside attention, others mix tokens or read features."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.tp_cases import DIM, EQUAL, HEAD, TOKENS, VOCAB, Attention, FeedForward, outcome
from weft.comm.collectives import all_reduce
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import WeftError
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.parallelize import Application, shard

WIDE = 2 * DIM


class Stack(nn.Module):
    """Blocks between an embedding and a head. times: calls of each block in a row. rounds: passes over all blocks."""

    def __init__(self, make: Callable[[], nn.Module], layers: int = 2, times: int = 1, rounds: int = 1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)
        self.times, self.rounds = times, rounds

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(self.rounds):
            for layer in self.layers:
                for _ in range(self.times):
                    x = layer(x)
        return self.head(self.norm(x))


class PreNorm(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, ff: Callable[[], nn.Module] = FeedForward, attn: Callable[[], nn.Module] = Attention):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.ff = nn.LayerNorm(DIM), attn(), nn.LayerNorm(DIM), ff()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


def heads(x, width=HEAD):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


# Feed-forward parts that treat each token separately.


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(DIM + n * 8, 8) for n in range(3))
        self.out = nn.Linear(DIM + 24, DIM)

    def forward(self, x):
        for step in self.steps:
            x = torch.cat((x, F.gelu(step(x))), -1)
        return self.out(x)


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        return self.c(F.silu(self.b(F.silu(self.a(x)))))


class FourLayers(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(DIM, WIDE), nn.ReLU(), nn.Linear(WIDE, DIM), nn.ReLU(), nn.Linear(DIM, WIDE), nn.Dropout(0.0),
            nn.Linear(WIDE, DIM),
        )  # fmt: skip


class Residual(nn.Module):
    """A residual network inside the feed-forward part."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
        self.inner = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

    def forward(self, x):
        h = self.enter(x)
        for layer in self.inner:
            h = h + F.relu(layer(h))
        return self.leave(h)


class NormedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(DIM, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(DIM, 2 * WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        gate, value = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Pointwise(nn.Module):
    """Convolutions over one token."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(DIM, WIDE, 1), nn.Conv1d(WIDE, DIM, 1)

    def forward(self, x):
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class Flat(FeedForward):
    def forward(self, x):
        b, t, d = x.shape
        return super().forward(x.reshape(-1, d)).reshape(b, t, d)


class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        return self.down(self.up(x).unflatten(-1, (WIDE, 3)).amax(-1))


class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.tanh(self.value(x)) - gate * x


class Memory(nn.Module):
    """Product-key style memory: reads the values of the best keys."""

    def __init__(self):
        super().__init__()
        self.query, self.keys, self.values = (
            nn.Linear(DIM, DIM),
            nn.Parameter(torch.randn(12, DIM)),
            nn.Embedding(12, DIM),
        )

    def forward(self, x):
        best = (self.query(x) @ self.keys.t()).topk(3, -1)
        return (best.values.softmax(-1)[..., None] * self.values(best.indices)).sum(-2)


class Basis(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(-1, 1, 4))
        self.mix = nn.Linear(DIM * 4, DIM)

    def forward(self, x):
        return self.mix(torch.exp(-((x[..., None] - self.centers) ** 2)).flatten(-2))


class Experts(nn.Module):
    """Experts selected by token indices."""

    def __init__(self, shared: bool = False):
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))
        self.shared = FeedForward() if shared else None

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)


class NonzeroExperts(Experts):
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero(as_tuple=True)
            out[rows] = expert(x[rows]) * scores[rows][:, number, None]
        return out


class MaskedExperts(Experts):
    def forward(self, x):
        best = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = best == number
            if mask.any():
                out[mask] = expert(x[mask])
        return out


class MixtralExperts(Experts):
    """Experts selected by a one-hot mask and nonzero, as in Mixtral."""

    def forward(self, x):
        b, t, d = x.shape
        x = x.view(-1, d)
        weights, chosen = torch.topk(self.gate(x).softmax(dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros((b * t, d), dtype=x.dtype, device=x.device)
        mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        for number in range(4):
            slot, token = torch.where(mask[number])
            current = x[None, token].reshape(-1, d)
            out.index_add_(0, token, self.experts[number](current) * weights[token, slot, None])
        return out.reshape(b, t, d)


class SortedExperts(Experts):
    """Sorts tokens by expert and restores their order."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        best = self.gate(flat).argmax(-1)
        order = best.argsort()
        parts = flat[order].split(torch.bincount(best, minlength=4).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = torch.empty_like(made)
        out[order] = made
        return out.view_as(x)


class DenseExperts(Experts):
    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


# Attention.


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gate(Attention):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o(y * torch.sigmoid(self.g(x)))


class Normed(Attention):
    def __init__(self):
        super().__init__()
        self.qn, self.kn = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Rotary(Attention):
    """Computes positions inside attention, which has all tokens."""

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(HEAD // 2, dtype=x.dtype)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (one * cos + torch.cat((-one[..., HEAD // 2 :], one[..., : HEAD // 2]), -1) * sin for one in (q, k))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 8), nn.Linear(DIM, 8), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class ByHand(Attention):
    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(HEAD)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.o((scores.masked_fill(~mask, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Differential(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = Attention(), Attention(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.one(x) - self.scale * self.two(x)


class Nano(nn.Module):
    """As in nanoGPT: heads and width are attributes of the module."""

    def __init__(self, heads=4):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.n_head, self.n_embd = heads, DIM

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k, q, v = (one.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for one in (k, q, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Timm(nn.Module):
    """As in timm: one reshape into queries, keys and values per head."""

    def __init__(self, heads=2, known=True, index=False):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.num_heads, self.index = heads, index
        if known:
            self.head_dim = DIM // heads

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = (qkv[0], qkv[1], qkv[2]) if self.index else qkv.unbind(0)
        weights = ((q * 0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class Written(Attention):
    """Heads and head width are attributes with common names."""

    def __init__(self, heads=2):
        super().__init__()
        self.n_heads, self.d_model = heads, DIM

    def forward(self, x):
        b, t, _ = x.shape
        shape = (b, t, self.n_heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, self.d_model))


# Blocks.


class Parallel(PreNorm):
    def forward(self, x):
        h = self.norm1(x)
        return x + self.attn(h) + self.ff(h)


class PostNorm(PreNorm):
    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.ff(x))


class Sandwich(PreNorm):
    def __init__(self):
        super().__init__()
        self.out1, self.out2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.alpha, self.beta = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = x + self.alpha * self.out1(self.attn(self.norm1(x)))
        return x + self.beta * self.out2(self.ff(self.norm2(x)))


class AllInOne(nn.Module):
    """All layers are direct attributes of the block."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        q, k, v = map(heads, self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Streams(PreNorm):
    """Several residual streams per token."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        streams = torch.stack((x, x.tanh()), -2)
        streams = torch.einsum("btsd,sr->btrd", streams, self.mix)
        x = streams.sum(-2)
        return super().forward(x)


class Adapted(PreNorm):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 4), nn.Linear(4, DIM)

    def forward(self, x):
        x = super().forward(x)
        return x + self.up(F.relu(self.down(x)))


class ChunkedFF(PreNorm):
    """Runs the feed-forward part on a few tokens at a time."""

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + torch.cat([self.ff(self.norm2(part)) for part in x.split(2, 1)], 1)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x):
        return x * self.scale


class InFront(nn.Module):
    """Has a module without a linear layer or a norm in front of sharded layers."""

    def __init__(self, part):
        super().__init__()
        self.part, self.up, self.down = part, nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        part = self.part(x.mT).mT if isinstance(self.part, nn.Conv1d) else self.part(x)
        return x + self.down(F.gelu(self.up(part)))


class ListedNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        return self.norms[1](x + self.down(F.gelu(self.up(self.norms[0](x)))))


class GatedScan(nn.Module):
    """Loops over the number of tokens of its input. writes: into a tensor instead of a list."""

    def __init__(self, writes):
        super().__init__()
        self.norm, self.gate, self.value, self.out = nn.LayerNorm(DIM), *(nn.Linear(DIM, DIM) for _ in range(3))
        self.ff, self.writes = FeedForward(), writes

    def forward(self, x):
        y = self.norm(x)
        gate, value = self.gate(y).sigmoid(), self.value(y)
        state, out = torch.zeros_like(value[:, 0]), torch.zeros_like(value)
        states = []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + (1 - gate[:, t]) * value[:, t]
            states.append(state)
            if self.writes:
                out[:, t] = state
        x = x + self.out(out if self.writes else torch.stack(states, 1))
        return x + self.ff(x)


def with_ff(ff: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: PreNorm(ff))


def with_attention(attn: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: PreNorm(attn=attn))


LEGAL: dict[str, Callable[[], nn.Module]] = {
    "dense net ff": with_ff(DenseNet),
    "three layers": with_ff(ThreeLayers),
    "four layers": with_ff(FourLayers),
    "residual ff": with_ff(Residual),
    "norm in ff": with_ff(NormedInside),
    "gated": with_ff(Gated),
    "pointwise convolutions": with_ff(Pointwise),
    "flat ff": with_ff(Flat),
    "maxout": with_ff(Maxout),
    "highway": with_ff(Highway),
    "memory": with_ff(Memory),
    "basis": with_ff(Basis),
    "experts by where": with_ff(Experts),
    "experts with a shared one": with_ff(lambda: Experts(shared=True)),
    "experts by nonzero": with_ff(NonzeroExperts),
    "experts by mask": with_ff(MaskedExperts),
    "experts as in mixtral": with_ff(MixtralExperts),
    "sorted experts": with_ff(SortedExperts),
    "dense experts": with_ff(DenseExperts),
    "fused attention": with_attention(Fused),
    "gated attention": with_attention(Gate),
    "normed attention": with_attention(Normed),
    "rotary attention": with_attention(Rotary),
    "grouped attention": with_attention(Grouped),
    "attention by hand": with_attention(ByHand),
    "differential attention": with_attention(Differential),
    "nanoGPT": with_attention(lambda: Nano(2)),
    "nanoGPT with as many heads as features of one": with_attention(Nano),
    "timm": with_attention(Timm),
    "timm by index": with_attention(lambda: Timm(index=True, known=False)),
    "written heads": with_attention(Written),
    "parallel": lambda: Stack(Parallel),
    "post norm": lambda: Stack(PostNorm),
    "sandwich": lambda: Stack(Sandwich),
    "all in one": lambda: Stack(AllInOne),
    "streams": lambda: Stack(Streams),
    "adapted": lambda: Stack(Adapted),
    "chunks of tokens": lambda: Stack(ChunkedFF),
    "scale in front": lambda: Stack(lambda: InFront(Scale())),
    "convolution in front": lambda: Stack(lambda: InFront(nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM))),
    "norms in a list": lambda: Stack(ListedNorms),
    "loop over tokens": lambda: Stack(lambda: GatedScan(writes=False)),
    "loop into a tensor": lambda: Stack(lambda: GatedScan(writes=True)),
    "each block twice": lambda: Stack(PreNorm, times=2),
    "all blocks twice": lambda: Stack(PreNorm, rounds=2),
    "one block three times": lambda: Stack(PreNorm, layers=1, times=3),
}


# Blocks that mix tokens outside attention, or read features.


class Behind(FeedForward):
    """Mixes tokens after the second layer."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(1, keepdim=True)


class Counting(Attention):
    """Attention that takes the number of tokens as an argument."""

    def forward(self, x, length):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o((q @ k.mT / length @ v).transpose(1, 2).flatten(2))


class Counted(PreNorm):
    def __init__(self):
        super().__init__(attn=Counting)

    def forward(self, x):
        x = x + self.attn(self.norm1(x), x.shape[1])
        return x + self.ff(self.norm2(x))


class First(PreNorm):
    """A block that applies `change` to its input."""

    def __init__(self, change: Callable[..., Any], add: Callable[[nn.Module], None] | None = None):
        super().__init__()
        self.change = change
        if add is not None:
            add(self)

    def forward(self, x):
        return super().forward(self.change(self, x))


def first(change: Callable[..., Any], **modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def add(block: nn.Module) -> None:
        for name, make in modules.items():
            setattr(block, name, make())

    return lambda: Stack(lambda: First(change, add))


class Wide(FeedForward):
    """A feed-forward part that applies `change` between its two layers."""

    def __init__(self, change: Callable[..., Any]):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.down(self.change(F.gelu(self.up(x))))


def wide(change: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: PreNorm(lambda: Wide(change)))


def scan(block, x):
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = 0.9 * state + x[:, t]
        out.append(state)
    return x + torch.stack(out, 1)


def expert_choice(block, x):
    best = block.gate(x).softmax(1).topk(2, 1)
    rows = best.indices[..., 0, None].expand(-1, -1, DIM)
    return x.scatter_add(1, rows, block.side(x.gather(1, rows)))


def capacity(block, x):
    """Drop tokens beyond an expert's capacity."""
    best = F.one_hot(block.gate(x).argmax(-1), 4)
    slot = best.cumsum(1) * best
    return x * ((slot > 0) & (slot <= 2)).any(-1, keepdim=True)


def nonzero_capacity(block, x):
    flat = x.flatten(0, 1)
    out = flat.clone()
    for number in range(4):
        rows = (block.gate(flat).argmax(-1) == number).nonzero().flatten()[:3]
        out.index_add_(0, rows, block.side(flat[rows]))
    return out.view_as(x)


def expert_mean(block, x):
    """Center the tokens of an expert."""
    flat = x.flatten(0, 1)
    out = torch.zeros_like(flat)
    for number in range(4):
        rows = torch.where(block.gate(flat).argmax(-1) == number)[0]
        out.index_add_(0, rows, flat[rows] - flat[rows].mean(0))
    return x + out.view_as(x)


def expert_shift(block, x):
    flat = x.flatten(0, 1)
    rows = torch.where(block.gate(flat).argmax(-1) > 1)[0]
    return x + torch.zeros_like(flat).index_add_(0, rows, flat[rows].roll(1, 0)).view_as(x)


def expert_neighbour(block, x):
    flat = x.flatten(0, 1)
    rows = torch.where(block.gate(flat).argmax(-1) > 1)[0]
    return x + torch.zeros_like(flat).index_add_(0, (rows + 1) % len(flat), flat[rows]).view_as(x)


def expert_load(block, x):
    flat = x.flatten(0, 1)
    rows = torch.where(block.gate(flat).argmax(-1) > 1)[0]
    return x + torch.zeros_like(flat).index_add_(0, rows, flat[rows] * (len(rows) / len(flat))).view_as(x)


def expert_rank(block, x):
    flat = x.flatten(0, 1)
    rows = (block.gate(flat).argmax(-1) > 1).nonzero().squeeze(1)
    scale = torch.arange(rows.shape[0], dtype=x.dtype)[:, None]
    return x + torch.zeros_like(flat).index_add_(0, rows, flat[rows] * scale).view_as(x)


def other_rows(block, x):
    """Read some tokens and write to others."""
    flat, best = x.flatten(0, 1), block.gate(x.flatten(0, 1)).argmax(-1)
    rows = best.argsort()
    return x + torch.zeros_like(flat).index_add_(0, rows, flat).view_as(x)


def sorted_away(block, x):
    flat = x.flatten(0, 1)
    return x + flat[flat[:, 0].argsort()].view_as(x)


def masked_order(block, x):
    mask = x[..., 0] > 0
    out = x.clone()
    out[mask] = x[mask].flip(0)
    return out


def mask_of_other(block, x):
    mask = x[..., 0] > 0
    out = x.clone()
    rows = min(int(mask.sum()), int((~mask).sum()))
    out[mask.nonzero()[:rows].unbind(1)] = x[(~mask).nonzero()[:rows].unbind(1)]
    return out


ILLEGAL: dict[str, Callable[[], nn.Module]] = {
    "depthwise convolution": first(
        lambda b, x: x + b.conv(x.mT).mT, conv=lambda: nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)
    ),
    "spatial gating": first(lambda b, x: x * b.space(x.mT).mT, space=lambda: nn.Linear(TOKENS, TOKENS)),
    "mixer": first(
        lambda b, x: x + b.space(x.mT).mT,
        space=lambda: nn.Sequential(nn.Linear(TOKENS, 16), nn.GELU(), nn.Linear(16, TOKENS)),
    ),
    "fourier": first(lambda b, x: torch.fft.fft2(x).real),
    "token shift": first(
        lambda b, x: torch.lerp(x, F.pad(x, (0, 0, 1, -1)), b.mu), mu=lambda: nn.Parameter(torch.rand(DIM))
    ),
    "running mean": first(lambda b, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]),
    "scan": first(scan),
    "lstm": first(lambda b, x: b.rnn(x)[0], rnn=lambda: nn.LSTM(DIM, DIM, batch_first=True)),
    "pooling": first(lambda b, x: F.max_pool1d(x.mT, 3, 1, 1).mT),
    "excitation": first(
        lambda b, x: x * torch.sigmoid(b.side(x.mean(1, keepdim=True))), side=lambda: nn.Linear(DIM, DIM)
    ),
    "batch norm": first(lambda b, x: b.bn(x.mT).mT, bn=lambda: nn.BatchNorm1d(DIM)),
    "instance norm": first(lambda b, x: F.instance_norm(x.mT).mT),
    "positions": first(lambda b, x: x + b.pos(torch.arange(x.size(1))), pos=lambda: nn.Embedding(TOKENS, DIM)),
    "position table": first(
        lambda b, x: x + b.table[: x.size(1)], table=lambda: nn.Parameter(torch.randn(2 * TOKENS, DIM))
    ),
    "expert choice": first(expert_choice, gate=lambda: nn.Linear(DIM, 4), side=lambda: nn.Linear(DIM, DIM)),
    "capacity": first(capacity, gate=lambda: nn.Linear(DIM, 4)),
    "capacity by nonzero": first(nonzero_capacity, gate=lambda: nn.Linear(DIM, 4), side=lambda: nn.Linear(DIM, DIM)),
    "mean of an expert": first(expert_mean, gate=lambda: nn.Linear(DIM, 4)),
    "shift in an expert": first(expert_shift, gate=lambda: nn.Linear(DIM, 4)),
    "neighbours of an expert": first(expert_neighbour, gate=lambda: nn.Linear(DIM, 4)),
    "load of an expert": first(expert_load, gate=lambda: nn.Linear(DIM, 4)),
    "rank in an expert": first(expert_rank, gate=lambda: nn.Linear(DIM, 4)),
    "written elsewhere": first(other_rows, gate=lambda: nn.Linear(DIM, 4)),
    "sorted": first(sorted_away),
    "mask in another order": first(masked_order),
    "mask of other tokens": first(mask_of_other),
    "learned mixing": first(
        lambda b, x: x + b.mix.softmax(-1) @ x, mix=lambda: nn.Parameter(torch.randn(TOKENS, TOKENS))
    ),
    "attention without layers": first(lambda b, x: x + F.scaled_dot_product_attention(x, x, x)),
    "linear attention": first(lambda b, x: x + F.elu(x) @ (F.elu(x).mT @ x)),
    "last token": first(lambda b, x: x + x[:, -1:]),
    "unfold": first(lambda b, x: x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1)),
    "all tokens as features": first(
        lambda b, x: x + b.side(x.flatten(1)).view_as(x), side=lambda: nn.Linear(TOKENS * DIM, TOKENS * DIM)
    ),
    "normed tokens": first(lambda b, x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)),
    "softmax over tokens": first(lambda b, x: x * x.softmax(1)),
    "mean behind the row layer": with_ff(Behind),
    "length given": lambda: Stack(Counted),
    "width": wide(lambda h: h / h.shape[-1] ** 0.5),
    "halves": wide(lambda h: torch.cat(h.tensor_split(2, -1)[::-1], -1)),
    "norm of features": wide(lambda h: F.layer_norm(h, h.shape[-1:])),
    "group of features": wide(lambda h: h.unflatten(-1, (2, -1)).softmax(-1).flatten(-2)),
    "position of features": wide(lambda h: h * torch.arange(h.size(-1), dtype=h.dtype)),
    "largest feature": wide(lambda h: h / h.amax(-1, keepdim=True).clamp(1)),
}  # fmt: skip


class NoGradients(Stack):
    """Its output does not depend on its parameters."""

    def forward(self, ids):
        return super().forward(ids) * 0


ILLEGAL["no gradients"] = lambda: NoGradients(PreNorm)
CASES = LEGAL | ILLEGAL


def module_outcomes(names: list[str], plan: str, tokens: int = TOKENS) -> dict[str, str]:
    """Return the outcomes on this rank."""
    found: dict[str, str] = {}
    batch = torch.randint(VOCAB, (2, tokens), generator=torch.Generator().manual_seed(5))
    for name in names:
        try:
            found[name] = outcome(plan, CASES[name], batch)
        except Exception as error:  # a crash is reported as an outcome
            found[name] = f"crashed {type(error).__name__}: {error}"
    return found


def context_outcomes(names: list[str]) -> dict[str, str]:
    """Return the outcomes under cp=2 on this rank."""
    return {name: context_outcome(CASES[name]) for name in names}


def context_outcome(build: Callable[[], nn.Module]) -> str:
    """Return "equal", "differs ..." or "refused ..." for a model whose sequences two ranks share."""
    torch.manual_seed(3)
    model = build().double()
    other = copy.deepcopy(model)
    ids, labels = torch.randint(VOCAB, (2, 2, TOKENS), generator=torch.Generator().manual_seed(5))
    expected = _cross_entropy(model(ids), labels)
    expected.backward()
    mesh = build_mesh(Plan.parse("cp=2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shard(Application(other, mesh))
            part = shard_sequence(other, (ids, labels))
            with sequence_in_use(other):
                found = _cross_entropy(other(part[0]), part[1])
                found.backward()
        except WeftError as error:
            return f"refused {error}"
    worst = {"loss": abs(float(all_reduce(found.detach().clone(), mesh["cp"]) / expected.detach()) - 1)}
    grads = {name: param.grad for name, param in model.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for name, param in other.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        reference = torch.zeros_like(param) if grads[name] is None else grads[name]
        difference = float((all_reduce(grad.clone(), mesh["cp"]) - reference).abs().max())
        worst[name] = difference / max(float(reference.abs().max()), 1e-3 * scale)
    where = max(worst, key=lambda name: worst[name])
    return "equal" if worst[where] < EQUAL else f"differs {where} {worst[where]:.2g}"


def _cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
