"""Log-probabilities from the head match full logits, including gradients, for any vocabulary sharding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from weft.comm.mesh import Axis, build_mesh
from weft.config.partitioning import LossChunk
from weft.config.plan import Plan
from weft.parallel.tensor.head import LossChunking, token_loss
from weft.parallel.tensor.head_log_probs import token_log_probs
from weft.parallel.tensor.linear import SharedLayer

B, T, D, V = 2, 5, 6, 10


def make_inputs():
    rng = torch.Generator().manual_seed(0)
    x, weight, bias, weights = (torch.randn(*shape, generator=rng, dtype=torch.float64)
                              for shape in ((B, T, D), (V, D), (V,), (B, T)))  # fmt: skip
    labels = torch.randint(V, (B, T), generator=rng)
    labels[0, :2] = -100
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), weights, labels


def reference():
    x, weight, bias, weights, labels = make_inputs()
    losses = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), labels.flatten(), reduction="none")
    found = -losses.view(B, T)
    grads = torch.autograd.grad((found * weights).sum(), (x, weight, bias))
    return found.detach(), grads


@pytest.mark.parametrize("num_bytes", [8 * V * 3, 2**20])
def test_log_probs_match_full_logits(num_bytes):
    x, weight, bias, weights, labels = make_inputs()
    layer, chunking = SharedLayer(Axis("tp", 1, 0, (0,))), LossChunking(LossChunk(num_bytes))
    found = token_log_probs(x, weight, bias, labels, layer, V, -100, chunking)
    expected, grads = reference()
    torch.testing.assert_close(found, expected)
    for got, grad in zip(torch.autograd.grad((found * weights).sum(), (x, weight, bias)), grads, strict=True):
        torch.testing.assert_close(got, grad)
    # A weighted loss is the negated weighted sum.
    loss = token_loss(x, weight, bias, labels, layer, V, -100, chunking, weights)
    torch.testing.assert_close(loss, -(expected * weights).sum())
    for got, grad in zip(torch.autograd.grad(loss, (x, weight, bias)), grads, strict=True):
        torch.testing.assert_close(got, -grad)


def run_sharded():
    """Return log-probabilities and gradients with this rank's half of the vocabulary."""
    mesh = build_mesh(Plan.parse("tp=2"))
    x, weight, bias, weights, labels = make_inputs()
    rows = slice(mesh["tp"].rank * V // 2, (mesh["tp"].rank + 1) * V // 2)
    own = [one.detach()[rows].clone().requires_grad_() for one in (weight, bias)]
    found = token_log_probs(x, *own, labels, SharedLayer(mesh["tp"]), V, -100)
    grads = torch.autograd.grad((found * weights).sum(), (x, *own))
    return found.detach(), grads


def test_sharded_vocabulary_matches_full_logits(ranks2):
    expected, (grad_x, grad_weight, grad_bias) = reference()
    for rank, (found, grads) in enumerate(ranks2.run(run_sharded)):
        torch.testing.assert_close(found, expected)
        rows = slice(rank * V // 2, (rank + 1) * V // 2)
        for got, grad in zip(grads, (grad_x, grad_weight[rows], grad_bias[rows]), strict=True):
            torch.testing.assert_close(got, grad)
