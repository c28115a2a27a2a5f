"""Models that mix samples, or hide gradients from the recorder, where only some code paths show it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.privacy.private_cases import KEY
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError

WIDTH = 4


class Net(nn.Module):
    """Two linear layers around a function of the model."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], part: nn.Module | None = None):
        super().__init__()
        self.first, self.other, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.part, self.middle, self.calls = part, middle, 0
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.middle(self, self.first(x)))


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Einsum(nn.Module):
    """Reads its weight in an operation that only vmap can handle."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.weight, self.drop, self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Dropout(drop), None

    def forward(self, x: Any) -> Tensor:
        x = sum(x) if isinstance(x, list) else x
        return torch.einsum("bi,oi->bo", self.drop(x) if self.gate is None else x * self.gate, self.weight)


class Around(nn.Module):
    """Reads a parameter as its part does."""

    def __init__(self):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.randn(WIDTH, WIDTH)), Einsum()

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", self.part(x), self.weight)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


def remembers(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.lerp_(x.mean(0), 0.1)
    return x


def gated(net: Net, x: Tensor) -> Tensor:
    assert isinstance(net.part, Einsum)
    net.part.gate = torch.sigmoid(net.other(x))
    return net.part(x)


CHECKPOINT = "the model runs parts of forward again in backward, by torch.utils.checkpoint"
REFUSED = {
    "in training only": (lambda net, x: x + x.roll(1, 0) if net.training else x, None, "so the model mixes samples"),
    "the second sample only": (
        lambda net, x: x - torch.cat([torch.zeros_like(x[:1]), x[:-1].detach()]), None, "so the model mixes samples"
    ),
    "rows in another order": (
        lambda net, x: net.other(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()], None, "so the model mixes samples"
    ),
    "no row for a sample": (lambda net, x: net.other(x[:0]).sum() + x, None, "so its rows are not samples"),
    "batch norm as a function": (
        lambda net, x: F.batch_norm(x, None, None, training=True), None, "forward fails for one sample without others"
    ),
    "a buffer": (remembers, None, "forward writes values of samples to the buffer mean, which checkpoints contain"),
    "reentrant checkpoint": (lambda net, x: checkpoint(net.other, x, use_reentrant=True), None, CHECKPOINT),
    "checkpoint": (lambda net, x: checkpoint(net.other, x, use_reentrant=False), None, CHECKPOINT),
    "a later custom function": (
        lambda net, x: Scale.apply(x, net.scale) if net.calls > 5 else x * net.scale, None,
        "the gradient of scale comes from a custom autograd function, a checkpointed part or the loss function",
    ),
    "a list": (lambda net, x: net.part([x, net.other(x)]), Einsum, "part reads tensors by keyword or in lists"),
    "an attribute": (gated, Einsum, "part reads a tensor that is not an argument of its forward"),
    "dropout": (
        lambda net, x: net.part(x), lambda: Einsum(0.5), "part returns other values for a sample alone than beside"
    ),
    "the place in the batch": (
        lambda net, x: torch.cat([net.part(x[:1]), net.part(x)[1:]]), Einsum, "part must read tensors with one row"
    ),
}  # fmt: skip


def step_of(model: nn.Module, passes: int = 0):
    plan = Plan.parse("precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    privacy = weft.Privacy(records=100, batch=4, steps=9, delta=1e-3, noise=1.0, key=KEY, passes=passes)
    return run.train_step(run.parallelize(model.double()), torch.optim.SGD, loss_fn, lr=0.1, privacy=privacy)


def metrics(step: Any, steps: int) -> list[Any]:
    return [step(batch_of(4)) for _ in range(steps)]


def loss_fn(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(samples)
    return (
        torch.randn(samples, WIDTH, generator=rng, dtype=torch.float64),
        torch.randint(WIDTH, (samples,), generator=rng),
    )


@pytest.mark.parametrize("kind", REFUSED)
def test_hidden_mixing_is_refused(kind):
    middle, part, text = REFUSED[kind]
    step = step_of(Net(middle, part and part()))
    with pytest.raises(ModelError, match=text):
        metrics(step, 4)


def test_mixing_is_found_after_a_step_of_one_sample():
    """A Poisson draw may have one sample, which shows nothing."""
    step = step_of(Net(lambda net, x: x - x.mean(0)))
    step(batch_of(1))
    with pytest.raises(ModelError, match="so the model mixes samples"):
        step(batch_of(3))


def test_noise_and_dropout_do_not_look_like_mixing():
    def hidden(net: Net, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, net.training)

    for model in (Net(hidden), Net(lambda net, x: net.part(x), nn.Dropout(0.5)), Noisy(lambda net, x: x)):
        assert step_of(model)(batch_of(4)).skipped is None
    mixed = Net(lambda net, x: net.part(x.roll(1, 0)) + x, nn.Dropout(0.5))
    with pytest.raises(ModelError, match="so the model mixes samples"):
        metrics(step_of(mixed), 1)


def test_modules_of_vmap_in_each_other():
    step = step_of(Net(lambda net, x: net.part(x), Around()))
    assert step(batch_of(4)).skipped is None


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 2, 1, groups=2), nn.Flatten(),
        nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH),
    )  # fmt: skip


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(WIDTH, WIDTH), convolutions, Einsum], ids=["linear", "conv", "vmap"]
)
@pytest.mark.parametrize("passes", [1, 2])
def test_sample_that_is_not_finite_is_left_out(passes, build):
    """Otherwise one record would decide whether the step of all others counts."""
    found = []
    for bad in (None, 2):
        torch.manual_seed(0)
        model = Net(lambda net, x: torch.tanh(net.part(x)), build())
        step = step_of(model, passes)
        step.privacy.add_noise = lambda factor, step=step: step.privacy.ledger.add()
        x, labels = batch_of(4)
        if bad is not None:
            x[bad] = float("nan")
        kept = [one for one in range(4) if one != 2]
        result = step((x, labels) if bad is not None else (x[kept], labels[kept]))
        assert result.skipped is None
        assert math.isfinite(result.loss)
        found.append([param.detach().clone() for param in model.parameters()])
    for left_out, alone in zip(*found, strict=True):
        torch.testing.assert_close(left_out, alone, rtol=0, atol=1e-12)


def test_batches_that_were_not_drawn():
    with pytest.warns(weft.WeftWarning, match="this step's batch was not drawn by run.private_batches"):
        step_of(Net(lambda net, x: x))(batch_of(4))


def test_drawn_batches_do_not_warn(recwarn):
    plan = Plan.parse("precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    model = run.parallelize(Net(lambda net, x: x).double())
    privacy = weft.Privacy(records=8, batch=4, steps=3, delta=1e-3, noise=1.0, key=KEY)
    step = run.train_step(model, torch.optim.SGD, loss_fn, lr=0.1, privacy=privacy)
    data = list(zip(*batch_of(8), strict=True))
    assert len([step(batch) for batch in run.private_batches(data, step)]) == 3
    assert not [one for one in recwarn if "was not drawn" in str(one.message)]


def test_counters_are_no_values_of_samples():
    def counts(net: Net, x: Tensor) -> Tensor:
        net.mean.add_(1)
        return x

    model = Net(counts)
    step_of(model)(batch_of(4))
    assert model.mean.eq(1).all()  # the check restores buffers
