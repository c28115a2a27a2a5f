"""Operations on sharded features of hand-written feed-forward layers and attention, and forms of plain attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.token_cases import CumulativeFunction, Square
from tests.parallel.tp_cases import DIM, HEAD, Block, Net, outcomes

WIDE = 4 * DIM


def add_parts(block):
    ff = block.ff
    ff.gate, ff.one = nn.Linear(DIM, WIDE), nn.Linear(DIM, 1)
    ff.norm = nn.LayerNorm(WIDE)


def with_gate(ff, h):
    return h * torch.sigmoid(ff.gate(ff.kept))


def indexed(h):
    h = h.clone()
    h[..., 0] = 0.0
    return h


def filled(h):
    out = torch.empty_like(h)
    out[..., :8], out[..., 8:] = h[..., -8:], h[..., :-8]
    return out


def detached_mean(h):
    with torch.no_grad():
        center = h.mean(-1, keepdim=True)
    return h - center


#: Operations between the feed-forward layers that treat features separately, or in groups within a rank.
LEGAL: dict[str, Any] = {
    "nothing": lambda ff, h: h,
    "relu squared": lambda ff, h: h.relu().square(),
    "silu gate by chunk": lambda ff, h: torch.cat((F.silu(h) * h,), -1),
    "softplus": lambda ff, h: F.softplus(h) + h.tanh(),
    "where": lambda ff, h: torch.where(h > 0, h, 0.1 * h),
    "clamp": lambda ff, h: h.clamp(-1, 2),
    "groups of eight": lambda ff, h: h.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2),
    "norm of groups of eight": lambda ff, h: F.layer_norm(h.unflatten(-1, (-1, 8)), (8,)).flatten(-2),
    "sort in groups": lambda ff, h: h.unflatten(-1, (-1, 4)).sort(-1).values.flatten(-2),
    "by size": lambda ff, h: h.view(h.shape[0], h.shape[1], h.shape[2]) * 2,
    "groups by size": lambda ff, h: h.view(*h.shape[:-1], h.shape[-1] // 8, 8).mul(3).view(h.shape),
    "flat": lambda ff, h: h.flatten(0, 1).mul(2).view(h.shape),
    "transposed": lambda ff, h: h.transpose(1, 2).exp().transpose(1, 2),
    "cumsum of tokens": lambda ff, h: h.cumsum(1),
    "roll of tokens": lambda ff, h: h.roll(1, 1),
    "mean of tokens": lambda ff, h: h - h.mean(1, keepdim=True),
    "pooling of tokens": lambda ff, h: F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "pad of tokens": lambda ff, h: F.pad(h, (0, 0, 1, -1)),
    "length of tokens": lambda ff, h: h / h.shape[1],
    "mean of batch": lambda ff, h: h - h.mean(0, keepdim=True),
    "custom function": lambda ff, h: Square.apply(h),
    "detach": lambda ff, h: h + h.detach(),
    "no grad": lambda ff, h: h * h.detach().sign(),
    "in place": lambda ff, h: h.clone().mul_(2).add_(1),
    "in place of the layer's output": lambda ff, h: h.mul_(2).relu_(),
    "scalar tensor": lambda ff, h: h * torch.tensor(0.5, dtype=h.dtype),
    "positions": lambda ff, h: h * torch.arange(h.shape[1], dtype=h.dtype)[:, None],
    "dropout of zero": lambda ff, h: F.dropout(h, 0.0),
    "same shape": lambda ff, h: h * 2 if h.shape == (h + 1).shape else h,
    "new_zeros": lambda ff, h: h + h.new_zeros(1),
    "zeros_like": lambda ff, h: h + torch.zeros_like(h),
    "mask of tokens": lambda ff, h: h.masked_fill(torch.arange(h.shape[1])[None, :, None] > 5, 0.0),
    "complex": lambda ff, h: torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2)))).flatten(-2),
    "scalar of the module": lambda ff, h: h * ff.alpha,
    "scale of one": lambda ff, h: h * ff.scale,
    "checkpoint": lambda ff, h: torch.utils.checkpoint.checkpoint(F.gelu, h, use_reentrant=False),
}
#: Operations that mix features or depend on their number.
MIXING: dict[str, Any] = {
    "root of width": lambda ff, h: h / h.shape[-1] ** 0.5,
    "width": lambda ff, h: h / h.size(-1),
    "width by sqrt": lambda ff, h: h / math.sqrt(h.size(-1)),
    "log of width": lambda ff, h: h / math.log(h.shape[2]),
    "inverse width": lambda ff, h: h * (1.0 / h.shape[-1]),
    "numel": lambda ff, h: h / h.numel(),
    "len": lambda ff, h: h / len(h[0, 0]),
    "len of transposed": lambda ff, h: h / len(h.permute(2, 0, 1)),
    "numel of shape": lambda ff, h: h / h.shape.numel(),
    "branch": lambda ff, h: h * 2 if h.shape[-1] > 40 else h,
    "norm of four groups": lambda ff, h: F.layer_norm(h.unflatten(-1, (4, -1)), (h.shape[-1] // 4,)).flatten(-2),
    "norm of four groups by rms": lambda ff, h: F.rms_norm(h.unflatten(-1, (4, -1)), (WIDE // 4,)).flatten(-2),
    "softmax of four groups": lambda ff, h: h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2),
    "mean of four groups": lambda ff, h: (
        h.view(*h.shape[:2], 4, -1) - h.view(*h.shape[:2], 4, -1).mean(-1, keepdim=True)
    ).flatten(-2),
    "group norm": lambda ff, h: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
    "layer norm": lambda ff, h: F.layer_norm(h, (h.shape[-1],)),
    "layer norm by module": lambda ff, h: ff.norm(h) * ff.one(ff.kept),
    "rms by hand": lambda ff, h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax": lambda ff, h: h.softmax(-1),
    "mean": lambda ff, h: h - h.mean(-1, keepdim=True),
    "no grad mean": lambda ff, h: detached_mean(h),
    "max": lambda ff, h: h / h.amax(-1, keepdim=True),
    "norm": lambda ff, h: F.normalize(h, dim=-1),
    "sort": lambda ff, h: h.sort(-1).values,
    "topk": lambda ff, h: h * (h >= h.topk(8, -1).values[..., -1:]),
    "cumsum": lambda ff, h: h.cumsum(-1),
    "fft": lambda ff, h: torch.fft.fft(h, dim=-1).real,
    "roll": lambda ff, h: h.roll(1, -1),
    "flip": lambda ff, h: h.flip(-1),
    "chunk and swap": lambda ff, h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "gate of halves": lambda ff, h: torch.cat((h.chunk(2, -1)[0] * h.chunk(2, -1)[1],) * 2, -1),
    "slice and swap": lambda ff, h: torch.cat((h[..., 8:], h[..., :8]), -1),
    "split by number": lambda ff, h: torch.cat(h.split(WIDE // 2, -1)[::-1], -1),
    "first feature": lambda ff, h: h * h[..., :1],
    "last feature": lambda ff, h: h * h[..., -1:],
    "select": lambda ff, h: h * h.select(-1, 3)[..., None],
    "narrow": lambda ff, h: h * h.narrow(-1, 0, 1),
    "indexed write": lambda ff, h: indexed(h),
    "filled": lambda ff, h: filled(h),
    "every other": lambda ff, h: torch.stack((h[..., ::2], h[..., 1::2]), -1).flatten(-2),
    "interleaved": lambda ff, h: h.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "range": lambda ff, h: h * torch.arange(h.shape[-1], dtype=h.dtype),
    "linspace": lambda ff, h: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype),
    "mask of width": lambda ff, h: h * (torch.arange(h.shape[-1]) % 3 > 0),
    "written down mask": lambda ff, h: h * (torch.arange(WIDE) % 3 > 0),
    "full": lambda ff, h: h * torch.full((1,), 1.0 / h.shape[-1], dtype=h.dtype),
    "tensor of width": lambda ff, h: h / torch.tensor(float(h.shape[-1])),
    "ones": lambda ff, h: h * torch.ones(h.shape[-1], dtype=h.dtype).cumsum(0),
    "custom mixing": lambda ff, h: CumulativeFunction.apply(h.transpose(1, 2)).transpose(1, 2),
    "gate from outside": lambda ff, h: h * ff.one(ff.kept),
    "pooling": lambda ff, h: F.avg_pool1d(h, 3, 1, 1),
    "pad": lambda ff, h: F.pad(h, (1, -1)),
    "matmul": lambda ff, h: h @ torch.ones(WIDE, WIDE, dtype=h.dtype).tril(),
    "einsum": lambda ff, h: torch.einsum("btd,bsd->bts", h, h) @ h,
    "sum of all": lambda ff, h: h / h.sum(),
    "std": lambda ff, h: h / h.std(-1, keepdim=True),
    "diff": lambda ff, h: F.pad(h.diff(dim=-1), (1, 0)),
    "gather": lambda ff, h: h.gather(-1, h.argsort(-1)),
    "take by index": lambda ff, h: h[..., torch.arange(WIDE).flip(0)],
    "unbind": lambda ff, h: torch.stack(h.unbind(-1)[::-1], -1),
    "argmax": lambda ff, h: h * h.argmax(-1, keepdim=True),
    "logsumexp": lambda ff, h: h - h.logsumexp(-1, keepdim=True),
    "quantile": lambda ff, h: h - h.quantile(0.5, -1, keepdim=True),
    "count": lambda ff, h: h * (h > 0).sum(-1, keepdim=True),
    "covariance": lambda ff, h: h @ (h.mT @ h / WIDE),
    "vmap of width": lambda ff, h: torch.vmap(torch.vmap(lambda one: one / one.shape[0]))(h),
}


class NanoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.n_head, self.n_embd = DIM // HEAD, DIM

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            one.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for one in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class OwnHeads(nn.Module):
    """Attention written by hand, with a scale and an unusual attribute name for the heads."""

    def __init__(self, by_size=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.h, self.d, self.by_size = DIM // HEAD, HEAD, by_size

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        shape = (b, t, -1, self.d) if self.by_size else (b, t, self.h, self.d)
        q, k, v = (one.reshape(shape).permute(0, 2, 1, 3) for one in (q, k, v))
        weights = (q @ k.transpose(-2, -1) / self.d**0.5).softmax(-1)
        return self.out((weights @ v).permute(0, 2, 1, 3).reshape(b, t, -1 if self.by_size else self.h * self.d))


class TimmAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = DIM // HEAD, HEAD, HEAD**-0.5
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class WidthScaled(OwnHeads):
    """Scales by the width of the input and of all heads."""

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, self.d)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / (q.shape[1] * self.d) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class MixedHeads(OwnHeads):
    """Talking-heads attention: heads are mixed before the softmax."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(self.h, self.h))

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, self.d)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bhts,hg->bgts", q @ k.mT, self.mixing)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Alibi(OwnHeads):
    """ALiBi: a slope per head index."""

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, self.d)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], dtype=x.dtype)
        slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, dtype=x.dtype)
        bias = -slopes[:, None, None] * (at[:, None] - at).abs()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class LearnedBias(OwnHeads):
    """Learned bias per head and pair of tokens."""

    def __init__(self, heads):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(heads, 8, 8))

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, self.d)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).transpose(1, 2).flatten(2))


ATTENTION: dict[str, Any] = {
    "nanoGPT": NanoAttention,
    "own names": OwnHeads,
    "own names by -1": lambda: OwnHeads(by_size=True),
    "timm": TimmAttention,
    "scaled by heads": WidthScaled,
    "talking heads": MixedHeads,
    "alibi": Alibi,
    "bias of each head": lambda: LearnedBias(DIM // HEAD),
    "bias of all heads": lambda: LearnedBias(1),
}


def in_feed_forward(operation, keeps_input=False) -> dict[str, Any]:
    return {"inside": operation, "add_block": _keep_input if keeps_input else _only_scales}


def _only_scales(block):
    block.ff.alpha, block.ff.scale = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))


def _keep_input(block):
    add_parts(block)
    block.ff.register_forward_pre_hook(lambda ff, args: ff.__dict__.__setitem__("kept", args[0]))


def _with_attention(make):
    def build():
        net = Net()
        net.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in net.blocks:
            block.attn = make()
        return net

    return build


CASES: dict[str, Any] = {
    **{f"{name} in the feed-forward part": in_feed_forward(one) for name, one in (LEGAL | MIXING).items()},
    **{f"{name}: attention": _with_attention(make) for name, make in ATTENTION.items()},
}
CASES["layer norm by module in the feed-forward part"] = in_feed_forward(
    MIXING["layer norm by module"], keeps_input=True
)
CASES["gate from outside in the feed-forward part"] = in_feed_forward(MIXING["gate from outside"], keeps_input=True)


def feature_outcomes(names: list[str], plan: str = "tp=2") -> dict[str, str]:
    """Return the outcomes on this rank."""
    return outcomes(plan, names, CASES)
