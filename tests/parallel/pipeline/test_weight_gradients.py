"""Deferred weight gradients equal undeferred ones, and no other gradient is deferred."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tools.live_memory import LiveTensors
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.layers.deferred_gradients import DeferredWeightGrad
from weft.parallel.parallelize import Application, shard
from weft.parallel.pipeline.runtime import defer_weight_gradients, deliver


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2, whose weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), Conv1D(5, 6), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(3, 3)
    ).double()


def grads(model):
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_split_backward_gives_equal_gradients(recompute):
    plain, split = build(), build()
    deferred = DeferredWeightGrad()
    assert defer_weight_gradients(split, deferred) == 4
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    plain_x, split_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(plain_x).square().sum().backward()
    output = checkpoint(split, split_x, use_reentrant=False) if recompute else split(split_x)
    waiting = deferred.during([output.square().sum()])
    torch.testing.assert_close(split_x.grad, plain_x.grad)
    early = {name for name, grad in grads(split).items() if grad is not None}
    assert early == {"0.bias", "1.weight", "1.bias", "2.bias", "5.bias"}
    deliver(waiting)
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(split)[name], grad)


def test_forward_without_a_later_weight_gradient_uses_the_backward_of_torch():
    plain, split, deferred = build(), build(), DeferredWeightGrad()
    defer_weight_gradients(split, deferred)
    deferred.may_defer = False
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    assert split[0](x).grad_fn.name() == plain[0](x).grad_fn.name() == "ViewBackward0"
    plain(x).square().sum().backward()
    split(x).square().sum().backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(split)[name], grad)


@pytest.mark.parametrize("differentiable", [True, False])
def test_gradient_inside_of_a_recomputed_forward_is_not_deferred(differentiable):
    def force(model):
        def forward(x):
            x = x * 1.5
            energy = model(x).square().sum()
            return x * torch.autograd.grad(energy, x, create_graph=differentiable, retain_graph=True)[0], energy

        return forward

    plain, split, deferred = build(), build(), DeferredWeightGrad()
    defer_weight_gradients(split, deferred)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    outputs = force(plain)(x)
    torch.autograd.backward([outputs[0].sum(), outputs[1]])
    outputs = checkpoint(force(split), x, use_reentrant=False)
    deliver(deferred.during([outputs[0].sum(), outputs[1]]))
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(split)[name], grad, rtol=1e-12, atol=1e-14)


def test_plain_backward_defers_nothing():
    plain, split = build(), build()
    defer_weight_gradients(split, DeferredWeightGrad())
    x = torch.randn(3, 4, dtype=torch.float64)
    for model in (plain, split):
        model(x).square().sum().backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(split)[name], grad)


def test_delivered_gradients_accumulate_and_call_hooks():
    """Check that hooks are called and that gradients accumulate.

    autograd calls hooks in the first half too, with the previous gradient.
    """
    layer, deferred = nn.Linear(2, 2, bias=False), DeferredWeightGrad()
    defer_weight_gradients(nn.Sequential(layer), deferred)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(0.0 if param.grad is None else param.grad.sum().item())
    )
    for _ in range(2):
        waiting = deferred.during([layer(torch.ones(1, 2)).sum()])
        assert len(waiting) == 1
        deliver(waiting)
    assert seen == [0.0, 4.0, 4.0, 8.0]


def test_weight_with_hook_gets_its_gradient_in_backward():
    layer, deferred = nn.Linear(2, 2, bias=False), DeferredWeightGrad()
    defer_weight_gradients(nn.Sequential(layer), deferred)
    layer.weight.register_hook(lambda grad: grad * 0.5)
    assert deferred.during([layer(torch.ones(1, 2)).sum()]) == []
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 0.5))


def test_weight_used_twice_gets_its_gradient_once():
    layer, plain, deferred = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), DeferredWeightGrad()
    plain.load_state_dict(layer.state_dict())
    defer_weight_gradients(nn.Sequential(layer), deferred)
    x, seen = torch.randn(2, 3), []
    waiting = deferred.during([layer(layer(x)).sum()])
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    deliver(waiting)
    plain(plain(x)).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_delivery_allocates_one_gradient_after_another():
    model, deferred = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), DeferredWeightGrad()
    defer_weight_gradients(model, deferred)
    x = torch.randn(4, 64)
    deliver(deferred.during([model(x).sum()]))
    waiting = deferred.during([model(x).sum()])
    with LiveTensors(layer.weight.grad for layer in model) as live:
        deliver(waiting)
    assert live.peak < 2 * model[0].weight.nbytes
    assert not waiting


def test_frozen_weights_defer_nothing():
    model, deferred = build().requires_grad_(False), DeferredWeightGrad()
    defer_weight_gradients(model, deferred)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert deferred.during([model(x).sum()]) == []
    assert x.grad is not None


def test_layers_with_custom_forward_are_not_deferred():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    model = nn.Sequential(Doubled(2, 2), patched)
    assert defer_weight_gradients(model, DeferredWeightGrad()) == 0


def test_deferral_keeps_names_and_state_dict():
    model = build()
    before = list(model.state_dict())
    defer_weight_gradients(model, DeferredWeightGrad())
    assert list(model.state_dict()) == before
    assert isinstance(model[0], nn.Linear)


SPEC = DecoderSpec(vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=16)


def sharded_gradients(plan_text, kind):
    """Return gradients of full and split backwards on this rank, with the deferred count and the early gradients."""
    mesh = build_mesh(Plan.parse(plan_text))
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for splits in (False, True):
        model = build_decoder(dataclasses.replace(SPEC, family=kind), dtype=torch.float64, seed=0)
        shard(Application(model, mesh))
        deferred = DeferredWeightGrad()
        if splits:
            defer_weight_gradients(model, deferred)
        loss = model(ids).square().sum()
        waiting = deferred.during([loss])
        num_waiting, early = len(waiting), {name for name, grad in grads(model).items() if grad is not None}
        deliver(waiting)
        found.append((num_waiting, early, grads(model)))
    return found


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sp=on"])
@pytest.mark.parametrize(("kind", "num_layers"), [("llama", 7), ("gpt2", 6)])
def test_sharded_layers_defer_weight_gradients(plan, kind, num_layers, ranks2):
    for (none, _, undeferred), (num_waiting, early, split) in ranks2.run(sharded_gradients, plan, kind):
        assert (none, num_waiting) == (0, num_layers * SPEC.num_layers)
        assert not [
            name for name in early if name.startswith("blocks") and name.endswith("weight") and "norm" not in name
        ]
        assert undeferred.keys() == split.keys()
        assert all(grad is not None for grad in undeferred.values())
        for name, grad in undeferred.items():
            torch.testing.assert_close(split[name], grad, rtol=1e-12, atol=1e-14)
