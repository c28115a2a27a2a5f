"""Operations on tokens in hand-written models, within blocks and between blocks."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.tp_cases import DIM, TOKENS, Attention, Block, FeedForward, Net, outcomes


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)


class CumulativeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(1).cumsum(1).flip(1)


def add_linear(block):
    block.side = nn.Linear(DIM, DIM)
    block.gate = nn.Linear(DIM, 4)


def add_table(block):
    block.pos = nn.Embedding(TOKENS, DIM)
    block.table = nn.Parameter(torch.randn(1, TOKENS, DIM))
    block.register_buffer("fixed", torch.randn(TOKENS, DIM))


def add_conv(block):
    block.conv = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)
    block.one = nn.Conv1d(DIM, DIM, 1)


def add_scale(block):
    block.scale, block.shift = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))
    block.alpha = nn.Parameter(torch.tensor(0.5))


def add_experts(block):
    block.gate = nn.Linear(DIM, 4)
    block.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))


def add_running(block):
    block.register_buffer("running", torch.zeros(DIM))
    block.register_buffer("steps", torch.zeros(()))


def mixed_by_index(block, x):
    x = x.clone()
    x[:, 0] = 0.0
    return x


def shifted(block, x):
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    return x + out


def shifted_half(block, x):
    a, b = x.chunk(2, -1)
    return x + torch.cat((a, F.pad(b, (0, 0, 1, -1))), -1)


def running_mean(block, x):
    block.running.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x + block.running


def counted_steps(block, x):
    block.steps += 1
    return x


def dense_experts(block, x):
    weights = block.gate(x).softmax(-1)
    return x + sum(weights[..., n, None] * expert(x) for n, expert in enumerate(block.experts))


def masked_experts(block, x):
    top = block.gate(x).topk(2, -1)
    weights = torch.zeros_like(block.gate(x)).scatter(-1, top.indices, top.values.softmax(-1))
    return x + sum(weights[..., n : n + 1] * expert(x) for n, expert in enumerate(block.experts))


def capacity_experts(block, x):
    scores = block.gate(x).softmax(1)
    value, index = scores.topk(2, 1)
    picked = torch.einsum("bke,bkd->bed", value, torch.gather(x, 1, index[..., :1].expand(-1, -1, DIM)))
    return x + picked.mean(1, keepdim=True)


def stash(block, x):
    block.__dict__["kept"] = x
    return x


def rms(block, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * block.scale


def swapped(block, x):
    return x.transpose(0, 1).contiguous().transpose(0, 1) * 1.5


def data_alias(block, x):
    return x + x.data.cumsum(1) * 0.1


def no_grad_mean(block, x):
    with torch.no_grad():
        center = x.mean(1, keepdim=True)
    return x - center


def branch(block, x):
    return x * 2 if x.shape[1] > 5 else x


def python_item(block, x):
    return x * float(x.sum().item() > 0)


def heads_by_size(block, x):
    b, t, c = x.shape
    return F.layer_norm(x.view(b, t, 4, c // 4), (c // 4,)).reshape(b, t, c)


def flat_tokens(block, x):
    b, t, c = x.shape
    return block.side(x.reshape(b * t, c)).view(b, t, c)


def einops_like(block, x):
    b, t, _ = x.shape
    return x.reshape(b, t, 4, -1).permute(0, 2, 1, 3).permute(0, 2, 1, 3).reshape(b, t, -1)


#: Operations that treat tokens separately. `ADDS` has the block's keyword arguments for cases that add modules.
LEGAL: dict[str, Any] = {
    "nothing": lambda block, x: x,
    "glu": lambda block, x: x + F.glu(torch.cat((x, block.side(x)), -1), -1),
    "swiglu": lambda block, x: x + F.silu(block.side(x)) * x,
    "rms by hand": rms,
    "rms_norm": lambda block, x: F.rms_norm(x, (DIM,), block.scale),
    "layer scale": lambda block, x: x + block.scale * torch.tanh(x),
    "scale and shift": lambda block, x: x * (1 + block.scale) + block.shift,
    "scalar": lambda block, x: x * block.alpha,
    "softmax of features": lambda block, x: x + x.softmax(-1),
    "topk of features": lambda block, x: x + x.topk(3, -1).values.sum(-1, keepdim=True),
    "sort of features": lambda block, x: x + x.sort(-1).values,
    "cumsum of features": lambda block, x: x + x.cumsum(-1),
    "roll of features": lambda block, x: x + x.roll(1, -1),
    "flip of features": lambda block, x: x + x.flip(-1),
    "pad of features": lambda block, x: x + F.pad(x, (1, -1)),
    "fft of features": lambda block, x: x + torch.fft.rfft(x, dim=-1).abs().sum(-1, keepdim=True),
    "chunk of features": lambda block, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "slice of features": lambda block, x: torch.cat((x[..., 4:], x[..., :4]), -1),
    "split by sizes": lambda block, x: torch.cat(x.split([4, DIM - 4], -1)[::-1], -1),
    "unbind features": lambda block, x: torch.stack(x.unbind(-1)[::-1], -1),
    "heads": heads_by_size,
    "heads by -1": lambda block, x: x.unflatten(-1, (-1, 4)).flip(-2).flatten(2),
    "flat tokens": flat_tokens,
    "flatten": lambda block, x: block.side(x.flatten(0, 1)).view_as(x),
    "einops": einops_like,
    "transposed": lambda block, x: x.transpose(1, 2).mul(2.0).transpose(1, 2),
    "mT": lambda block, x: x.mT.tanh().mT + x,
    "batch second": swapped,
    "movedim": lambda block, x: x.movedim(1, 0).sin().movedim(0, 1),
    "einsum": lambda block, x: x + torch.einsum("btd,ed->bte", x, block.side.weight),
    "einsum of heads": lambda block, x: torch.einsum(
        "bthd,hde->bthe", x.view(*x.shape[:2], 4, 4), block.side.weight.view(4, 4, 16)[..., :4]
    ).flatten(2),
    "matmul": lambda block, x: x + x @ block.side.weight.t(),
    "bilinear gate": lambda block, x: x + (block.side(x) * x).sum(-1, keepdim=True) / DIM,
    "normalize": lambda block, x: F.normalize(x, dim=-1),
    "cosine": lambda block, x: x * F.cosine_similarity(x, block.side(x), dim=-1)[..., None],
    "norm": lambda block, x: x / x.norm(dim=-1, keepdim=True),
    "std": lambda block, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3),
    "clamp": lambda block, x: x.clamp(-1, 1) + torch.maximum(x, block.scale),
    "where": lambda block, x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda block, x: x.masked_fill(x < -1, -1.0),
    "in place": lambda block, x: (x + 1).mul_(2).add_(block.scale),
    "in place features": lambda block, x: _set_features(x),
    "zeros of its shape": lambda block, x: x + torch.zeros(x.shape[0], x.shape[1], DIM, dtype=x.dtype),
    "new_zeros": lambda block, x: torch.cat((x[..., :8], x.new_zeros(*x.shape[:-1], 8)), -1),
    "ones_like": lambda block, x: x + torch.ones_like(x) * block.alpha,
    "filled": lambda block, x: _filled(x),
    "expand": lambda block, x: x + block.scale.expand(x.shape[0], x.shape[1], -1),
    "repeat": lambda block, x: x + block.scale.repeat(x.shape[0], x.shape[1], 1),
    "dropout of zero": lambda block, x: F.dropout(x, 0.0, training=block.training),
    "stochastic depth": lambda block, x: x + 0.5 * x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.5),
    "per sample": lambda block, x: x * torch.arange(1, x.shape[0] + 1, dtype=x.dtype)[:, None, None],
    "convolution of one": lambda block, x: x + block.one(x.transpose(1, 2)).transpose(1, 2),
    "custom function": lambda block, x: x + Square.apply(x),
    "checkpoint": lambda block, x: torch.utils.checkpoint.checkpoint(block.side, x, use_reentrant=False),
    "dense experts": dense_experts,
    "masked experts": masked_experts,
    "noop buffer": counted_steps,
    "list": lambda block, x: [x, x * 2][1],
    "dict": lambda block, x: {"x": x, "y": x.tanh()}["y"],
    "detach": lambda block, x: x + x.detach() * 0.1,
    "no grad": lambda block, x: x + _without_gradient(x),
    "group norm of heads": lambda block, x: F.group_norm(x.reshape(-1, DIM), 4).view_as(x),
    "one hot": lambda block, x: x + F.one_hot(x[..., :4].argmax(-1), DIM),
    "lookup": lambda block, x: x + block.side.weight[x[..., :4].argmax(-1)],
    "embedding": lambda block, x: x + F.embedding(x[..., :4].argmax(-1), block.side.weight),
    "take_along": lambda block, x: x + torch.gather(x, -1, x.argsort(-1)),
    "logsumexp": lambda block, x: x - x.logsumexp(-1, keepdim=True),
    "outer": lambda block, x: x + (x[..., :, None] * x[..., None, :]).sum(-1) / DIM,
    "vmap": lambda block, x: torch.vmap(torch.tanh)(x),
    "functional_call": lambda block, x: torch.func.functional_call(
        block.side, dict(block.side.named_parameters()), (x,)
    ),
    "float and back": lambda block, x: x.to(torch.float64).type_as(x) * 2,
    "complex": lambda block, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 1j).flatten(2),
    "cdist of codes": lambda block, x: x + torch.cdist(x, block.side.weight[None].expand(x.shape[0], -1, -1)),
    "addcmul": lambda block, x: torch.addcmul(x, x, block.scale),
    "lerp": lambda block, x: torch.lerp(x, block.side(x), 0.3),
    "same size": lambda block, x: x * 2 if x.shape == block.side(x).shape else x,
}

#: Operations that mix tokens, or depend on their number or position.
MIXING: dict[str, Any] = {
    "mean": lambda block, x: x - x.mean(1, keepdim=True),
    "global gate": lambda block, x: x * block.side(x.mean(1)).sigmoid()[:, None],
    "max": lambda block, x: x + x.amax(1, keepdim=True),
    "sum of all": lambda block, x: x / x.sum(),
    "std of all": lambda block, x: x / x.std(),
    "sort": lambda block, x: x + x.sort(1).values,
    "argsort": lambda block, x: x + x.gather(1, x.argsort(1)),
    "topk": lambda block, x: x + x.topk(3, 1).values.sum(1, keepdim=True),
    "median": lambda block, x: x - x.median(1, keepdim=True).values,
    "kthvalue": lambda block, x: x - x.kthvalue(2, 1, keepdim=True).values,
    "quantile": lambda block, x: x - x.quantile(0.5, 1, keepdim=True),
    "fft": lambda block, x: x + torch.fft.fft(x, dim=1).real,
    "fft2": lambda block, x: x + torch.fft.fft2(x).real,
    "average pooling": lambda block, x: x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "max pooling": lambda block, x: x + F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "adaptive pooling": lambda block, x: x + F.adaptive_avg_pool1d(x.transpose(1, 2), 1).transpose(1, 2),
    "interpolate": lambda block, x: x + F.interpolate(F.avg_pool1d(x.mT, 2), scale_factor=2.0).mT,
    "group norm": lambda block, x: x + F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "instance norm": lambda block, x: x + F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "layer norm of all": lambda block, x: x + F.layer_norm(x, x.shape[1:]),
    "norm over tokens": lambda block, x: F.normalize(x, dim=1),
    "einsum of tokens": lambda block, x: (
        x + torch.einsum("ts,bsd->btd", torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril(), x)
    ),
    "scores": lambda block, x: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "linear over tokens": lambda block, x: x + F.linear(x.mT, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)).mT,
    "gather last": lambda block, x: x + x.gather(1, torch.full((x.shape[0], 1, DIM), x.shape[1] - 1)),
    "gather first": lambda block, x: x + x.gather(1, torch.zeros((x.shape[0], 1, DIM), dtype=torch.int64)),
    "first": lambda block, x: x + x[:, :1],
    "last": lambda block, x: x + x[:, -1:],
    "select": lambda block, x: x + x.select(1, 0)[:, None],
    "index_select": lambda block, x: x + x.index_select(1, torch.arange(x.shape[1]).flip(0)),
    "take by index": lambda block, x: x + x[:, torch.arange(x.shape[1]).flip(0)],
    "count": lambda block, x: x * (x > 0).sum(1, keepdim=True),
    "any": lambda block, x: x * (x > 1).any(1, keepdim=True),
    "indexed write": mixed_by_index,
    "shift": shifted,
    "token shift": shifted_half,
    "roll": lambda block, x: x + x.roll(1, 1),
    "roll of all": lambda block, x: x + x.roll(1),
    "flip": lambda block, x: x + x.flip(1),
    "pad": lambda block, x: x + F.pad(x, (0, 0, 1, -1)),
    "diff": lambda block, x: x + F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "cumsum": lambda block, x: x + x.cumsum(1),
    "cummax": lambda block, x: x + x.cummax(1).values,
    "cumulative mean": lambda block, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None],
    "logcumsumexp": lambda block, x: x + x.logcumsumexp(1),
    "softmax": lambda block, x: x * x.softmax(1),
    "unfold": lambda block, x: x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "chunk": lambda block, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda block, x: torch.cat(x.split([2, x.shape[1] - 2], 1)[::-1], 1),
    "register token": lambda block, x: torch.cat((x.mean(1, keepdim=True), x), 1)[:, 1:] + x.mean(1, keepdim=True),
    "class token": lambda block, x: torch.cat((block.scale.expand(x.shape[0], 1, -1), x[:, 1:]), 1),
    "drop tokens": lambda block, x: torch.cat((x[:, ::2], x[:, 1::2]), 1),
    "merge tokens": lambda block, x: x.view(x.shape[0], x.shape[1] // 2, 2 * DIM).flip(-1).view(x.shape),
    "conv": lambda block, x: x + block.conv(x.transpose(1, 2)).transpose(1, 2),
    "causal conv": lambda block, x: x + F.conv1d(F.pad(x.mT, (2, 0)), block.conv.weight, groups=DIM).mT,
    "positions": lambda block, x: x + block.pos(torch.arange(x.shape[1])),
    "learned table": lambda block, x: x + block.table[:, : x.shape[1]],
    "learned table by rows": lambda block, x: x + block.pos.weight[: x.shape[1]],
    "buffer": lambda block, x: x + block.fixed[: x.shape[1]],
    "full table": lambda block, x: x + (block.table if x.shape[1] == TOKENS else block.table[:, : x.shape[1]]),
    "range": lambda block, x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "linspace": lambda block, x: x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None],
    "range by list": lambda block, x: x * torch.tensor(list(range(x.shape[1])), dtype=x.dtype)[:, None],
    "every third": lambda block, x: x * (torch.arange(x.shape[1]) % 3 == 0)[:, None],
    "length": lambda block, x: x / x.shape[1],
    "length by size": lambda block, x: x * x.size(1) ** -0.5,
    "root of length": lambda block, x: x / math.sqrt(x.shape[-2]),
    "log of length": lambda block, x: x * math.log(x.size(1)),
    "numel": lambda block, x: x / x.numel(),
    "len": lambda block, x: x / len(x[0]),
    "length of transposed": lambda block, x: x / len(x.transpose(0, 1)),
    "length as tensor": lambda block, x: x / torch.tensor(float(x.shape[1])),
    "length in full": lambda block, x: x + torch.full((1,), 1.0 / x.shape[1]),
    "length of shape": lambda block, x: x / x.shape.numel(),
    "sum by length": lambda block, x: x / sum(1 for _ in x[0]),
    "branch": branch,
    "length of heads": lambda block, x: x / x.view(x.shape[0], x.shape[1], 4, -1).shape[1],
    "length of flat": lambda block, x: x / x.flatten(0, 1).shape[0],
    "loop": lambda block, x: torch.stack([x[:, t] * (t + 1) for t in range(x.shape[1])], 1),
    "noise by token": lambda block, x: x + torch.linspace(0, 1, x.numel(), dtype=x.dtype).view(x.shape),
    "running statistics": running_mean,
    "capacity": capacity_experts,
    "data": data_alias,
    "no grad mean": no_grad_mean,
    "item": python_item,
    "custom mixing": lambda block, x: x + CumulativeFunction.apply(x),
    "custom backward": lambda block, x: MixingBackward.apply(x),
    "vmap over features": lambda block, x: torch.vmap(lambda one: one - one.mean(), in_dims=2, out_dims=2)(x),
    "vmap of length": lambda block, x: torch.vmap(lambda one: one / one.shape[0])(x),
    "triangle": lambda block, x: x * torch.ones(x.shape[1], DIM, dtype=x.dtype).tril(),
    "eye": lambda block, x: x + torch.eye(x.shape[1], DIM, dtype=x.dtype),
    "meshgrid": lambda block, x: (
        x + torch.meshgrid(torch.arange(x.shape[1]), torch.arange(DIM), indexing="ij")[0] * 0.1
    ),
    "bucketize": lambda block, x: x + torch.bucketize(torch.arange(x.shape[1]), torch.tensor([2, 4]))[:, None],
    "padded mask": lambda block, x: x * (torch.arange(x.shape[1])[None, :] < torch.tensor([5, 8])[:, None])[..., None],
    "covariance": lambda block, x: x @ (x.mT @ x / DIM),
    "bmm": lambda block, x: torch.bmm(torch.bmm(x, x.mT), x),
    "baddbmm": lambda block, x: torch.baddbmm(x, torch.bmm(x, x.mT), x),
    "attention": lambda block, x: F.scaled_dot_product_attention(x, x, x),
    "rnn-like": lambda block, x: _scan(x),
    "as_strided": lambda block, x: x + x.contiguous().as_strided((x.shape[0], x.shape[1], DIM), (0, DIM, 1)),
    "clip by norm": lambda block, x: x / x.norm(),
    "squeeze excite": lambda block, x: x * block.side(F.adaptive_avg_pool1d(x.mT, 1).flatten(1)).sigmoid().unsqueeze(1),
    "unique": lambda block, x: x / x[..., 0].round().unique().numel(),
    "nonzero": lambda block, x: x / (1 + (x[..., 0] > 0).nonzero().shape[0]),
    "boolean choice": lambda block, x: x - x[x[..., 0] > 0].mean(0),
    "masked_select": lambda block, x: x - x.masked_select(x > 0).mean(),
    "compare all": lambda block, x: x * 2 if bool((x[..., 0] > -100).all()) else x,
    "bincount": lambda block, x: x / (1 + torch.bincount((x[..., 0] > 0).flatten().long(), minlength=2)[1]),
    "searchsorted": lambda block, x: (
        x + torch.searchsorted(x[..., 0].sort(1).values.contiguous(), x[..., 0].contiguous())[..., None]
    ),
    "trace": lambda block, x: x * torch.diagonal(x, dim1=1, dim2=2).sum(-1)[:, None, None],
    "kron": lambda block, x: x + torch.tensordot(x, x, dims=([0, 1], [0, 1]))[0],
    "pdist": lambda block, x: x / (1 + torch.cdist(x, x).mean((1, 2))[:, None, None]),
    "renorm": lambda block, x: torch.renorm(x, 2, 0, 1.0),
    "glu over tokens": lambda block, x: torch.cat((F.glu(x, 1), F.glu(x, 1)), 1),
    "pixel shuffle": lambda block, x: F.pixel_unshuffle(x, 2).reshape(x.shape),
    "channel shuffle": lambda block, x: F.channel_shuffle(x[..., None], 2)[..., 0],
    "histogram": lambda block, x: x * x.detach().flatten().histc(4, -2, 2)[0],
    "bernoulli by token": lambda block, x: x * (torch.arange(x.numel()).view(x.shape) % 5 > 0),
    "scatter": lambda block, x: x.scatter(1, torch.zeros(x.shape[0], 1, DIM, dtype=torch.int64), 0.0),
    "index_add": lambda block, x: x.index_add(1, torch.tensor([0]), x[:, 1:2]),
    "index_copy": lambda block, x: x.index_copy(1, torch.tensor([0]), x[:, 1:2]),
    "swap in place": lambda block, x: _swap(x),
    "out": lambda block, x: torch.cumsum(x.detach(), 1, out=torch.empty_like(x)) + x,
    "rot90": lambda block, x: (
        torch.rot90(x[..., :TOKENS], 2, (1, 2)).repeat(1, 1, 2) + x if x.shape[1] == TOKENS else x
    ),
}


def _set_features(x):
    x = x.clone()
    x[..., :4] = x[..., :4] * 2
    return x


def _filled(x):
    out = torch.empty_like(x)
    out[..., :4], out[..., 4:] = x[..., -4:], x[..., :-4]
    return out


def _without_gradient(x):
    with torch.no_grad():
        return x.tanh()


def _scan(x):
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        out.append(state)
    return torch.stack(out, 1)


def _swap(x):
    x = x.clone()
    x[:, 0], x[:, 1] = x[:, 1].clone(), x[:, 0].clone()
    return x


def _add_all(block):
    add_linear(block)
    add_table(block)
    add_conv(block)
    add_scale(block)
    add_experts(block)
    add_running(block)


def in_block(operation) -> dict[str, Any]:
    return {"first": operation, "add_block": _add_all}


def between_blocks(operation) -> dict[str, Any]:
    return {"between": operation, "add": _add_all}


def _twice(net, x):
    for block in net.blocks:
        x = block(block(x))
    return x


def _again(net, x):
    for _ in range(2):
        for block in net.blocks:
            x = block(x)
    return x


def _reversed(net, x):
    for block in reversed(net.blocks):
        x = block(x)
    return x


def _skip(net, x):
    first = x
    for block in net.blocks:
        x = block(x) + first
    return x


def _long_skip(net, x):
    y = net.blocks[0](x)
    return net.blocks[1](y) + y


def _deep_supervision(net, x):
    seen = []
    for block in net.blocks:
        x = block(x)
        seen.append(x)
    return torch.stack(seen).mean(0)


def _condition(net, x):
    c = net.side(x.mean(1))
    for block in net.blocks:
        x = block(x, c)
    return x


def _token_condition(net, x):
    c = net.side(x)
    for block in net.blocks:
        x = block(x, c)
    return x


def _parameter(net, x):
    for block in net.blocks:
        x = block(x, net.scale)
    return x


def _stashed(net, x):
    c = net.side(x.mean(1))
    for block in net.blocks:
        block.__dict__["kept"] = c
        x = block(x)
    return x


def _teacher(net, x):
    y = x
    for block in net.blocks:
        y = block(y)
    return y + net.teacher(x).detach()


def _add_teacher(net):
    _add_all(net)
    net.teacher = copy.deepcopy(net.blocks[0]).requires_grad_(False)


def _student(net, x):
    for block in net.blocks:
        x = block(x)
    return x + net.teacher(x)


def _outside_use(net, x):
    for block in net.blocks:
        x = block(x)
    return net.blocks[0].ff(x) + x


def _read_stash(net, x):
    for block in net.blocks:
        x = block(x)
    return x + net.blocks[0].kept * 0.5


class AuxBlock(Block):
    def forward(self, x, *others):
        x = super().forward(x)
        return x, x.pow(2).mean()


class TokenAuxBlock(Block):
    def forward(self, x, *others):
        x = super().forward(x)
        return x, x.pow(2).mean(-1)


class WeightAuxBlock(Block):
    def forward(self, x, *others):
        return super().forward(x), self.n1.weight.pow(2).sum()


def _keep_aux(block, x):
    block.__dict__["aux"] = block.n1.weight.pow(2).sum()
    return x


def _with_aux(kind):
    def build():
        net = Net()
        net.blocks = nn.ModuleList(kind() for _ in range(2))

        def loop(net, x):
            total = 0.0
            for block in net.blocks:
                x, aux = block(x)
                total = total + aux.mean()
            return x * (1 + total)

        net.loop = loop
        return net

    return build


class Lists(nn.Module):
    """Layers in nested lists or dicts that are not called as modules."""

    def __init__(self, make):
        super().__init__()
        self.emb = nn.Embedding(11, DIM)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(DIM, 11)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            parts = list(layer.values()) if isinstance(layer, nn.ModuleDict) else list(layer)
            if len(parts) == 4:
                x = x + parts[1](parts[0](x))
                x = x + parts[3](parts[2](x))
            else:
                for part in parts:
                    x = x + part(x)
        return self.head(x)


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(DIM), fn

    def forward(self, x):
        return self.fn(self.norm(x))


def _quartet():
    return [nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), FeedForward()]


STRUCTURES: dict[str, Any] = {
    "twice in a row": {"loop": _twice},
    "all again": {"loop": _again},
    "reversed": {"loop": _reversed},
    "skip": {"loop": _skip},
    "long skip": {"loop": _long_skip},
    "deep supervision": {"loop": _deep_supervision},
    "condition": {"loop": _condition, "add": _add_all, "first": lambda block, x, c: x * (1 + c[:, None])},
    "condition by a layer": {
        "loop": _condition,
        "add": _add_all,
        "add_block": add_linear,
        "first": lambda block, x, c: x * (1 + block.side(c)[:, None]),
    },
    "condition for each token": {"loop": _token_condition, "add": _add_all, "first": lambda block, x, c: x * c},
    "parameter of the model": {"loop": _parameter, "add": _add_all, "first": lambda block, x, c: x * (1 + c)},
    "condition kept by the block": {
        "loop": _stashed,
        "add": _add_all,
        "first": lambda block, x: x * (1 + block.kept[:, None]),
    },
    "frozen teacher": {"loop": _teacher, "add": _add_teacher},
    "second model": {"loop": _student, "add": _add_teacher},
    "part used outside": {"loop": _outside_use},
    "hidden states kept": {"loop": _read_stash, "first": stash},
    "model parameter between": {"between": lambda net, x: x * net.scale, "add": _add_all},
    "model layer between": {"between": lambda net, x: net.side(x), "add": _add_all},
    "aux of all": _with_aux(AuxBlock),
    "aux for each token": _with_aux(TokenAuxBlock),
    "aux of weights": _with_aux(WeightAuxBlock),
    "aux of weights kept for the loss": {"first": _keep_aux},
    "lists of four": lambda: Lists(lambda: nn.ModuleList(_quartet())),
    "lists of two": lambda: Lists(lambda: nn.ModuleList([Attention(), FeedForward()])),
    "lists of prenorms": lambda: Lists(lambda: nn.ModuleList([PreNorm(Attention()), PreNorm(FeedForward())])),
    "dicts": lambda: Lists(lambda: nn.ModuleDict(dict(zip("abcd", _quartet(), strict=True)))),
}

CASES: dict[str, Any] = {
    **{f"{name} in a block": in_block(one) for name, one in (LEGAL | MIXING).items()},
    **{f"{name} between": between_blocks(one) for name, one in (LEGAL | MIXING).items()},
    **STRUCTURES,
}


def token_outcomes(names: list[str], plan: str = "tp=2 sp=on") -> dict[str, str]:
    """Return the outcomes on this rank."""
    return outcomes(plan, names, CASES)
