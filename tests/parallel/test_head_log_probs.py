"""Log-probabilities from the head: those of whole logits, with the same gradients, however the vocabulary is cut."""

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


def made():
    rng = torch.Generator().manual_seed(0)
    x, weight, bias, worth = (torch.randn(*shape, generator=rng, dtype=torch.float64)
                              for shape in ((B, T, D), (V, D), (V,), (B, T)))  # fmt: skip
    labels = torch.randint(V, (B, T), generator=rng)
    labels[0, :2] = -100
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), worth, labels


def plain():
    x, weight, bias, worth, labels = made()
    losses = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), labels.flatten(), reduction="none")
    found = -losses.view(B, T)
    grads = torch.autograd.grad((found * worth).sum(), (x, weight, bias))
    return found.detach(), grads


@pytest.mark.parametrize("num_bytes", [8 * V * 3, 2**20])
def test_they_are_those_of_whole_logits(num_bytes):
    x, weight, bias, worth, labels = made()
    line, way = SharedLayer(Axis("tp", 1, 0, (0,))), LossChunking(LossChunk(num_bytes))
    found = token_log_probs(x, weight, bias, labels, line, V, -100, way)
    wanted, grads = plain()
    torch.testing.assert_close(found, wanted)
    for got, grad in zip(torch.autograd.grad((found * worth).sum(), (x, weight, bias)), grads, strict=True):
        torch.testing.assert_close(got, grad)
    # A loss with weights is the same sum with the sign turned.
    loss = token_loss(x, weight, bias, labels, line, V, -100, way, worth)
    torch.testing.assert_close(loss, -(wanted * worth).sum())
    for got, grad in zip(torch.autograd.grad(loss, (x, weight, bias)), grads, strict=True):
        torch.testing.assert_close(got, -grad)


def cut():
    """This rank's half of the vocabulary: log-probabilities and gradients."""
    mesh = build_mesh(Plan.parse("tp=2"))
    x, weight, bias, worth, labels = made()
    rows = slice(mesh["tp"].rank * V // 2, (mesh["tp"].rank + 1) * V // 2)
    own = [one.detach()[rows].clone().requires_grad_() for one in (weight, bias)]
    found = token_log_probs(x, *own, labels, SharedLayer(mesh["tp"]), V, -100)
    grads = torch.autograd.grad((found * worth).sum(), (x, *own))
    return found.detach(), grads


def test_a_cut_vocabulary_gives_the_same(ranks2):
    wanted, (grad_x, grad_weight, grad_bias) = plain()
    for rank, (found, grads) in enumerate(ranks2.run(cut)):
        torch.testing.assert_close(found, wanted)
        rows = slice(rank * V // 2, (rank + 1) * V // 2)
        for got, grad in zip(grads, (grad_x, grad_weight[rows], grad_bias[rows]), strict=True):
            torch.testing.assert_close(got, grad)
