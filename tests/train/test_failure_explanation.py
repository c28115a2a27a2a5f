"""A model that cannot compute on its rank's shards: the first step names the module and a plan."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.train.test_step import batch_of, class_loss
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.train.step.errors import explain_failure, explains_failures
from weft.train.step.train_step import TrainStep
from weft.verify.rank_pool import RankError


class Inner(nn.Module):
    def forward(self, x):
        raise RuntimeError("shape '[4, 16]' is invalid for input of size 32\nmore of it")


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


class Bypassed(nn.Module):
    """Call its layers by `forward`, which skips their hooks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


HEADS = "the features, heads or vocabulary"
FAILS = "(RuntimeError: shape '[4, 16]' is invalid for input of size 32). If one process can train this model, use "


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("dp_shard=2 zero=2", None),
        (
            "tp=2",
            f"tp=2: inner (Inner) fails on a rank's part of the features, heads or vocabulary {FAILS}tp=1.",
        ),
        ("cp=2", f"cp=2: inner (Inner) fails on a rank's part of each sequence {FAILS}cp=1."),
        ("pp=2 microbatches=2", f"pp=2: inner (Inner) fails on a rank's part of the blocks {FAILS}pp=1."),
        (
            "tp=2 sp=on",
            "sp=on tp=2: inner (Inner) fails on a rank's part of the tokens between layers and the features, heads or "
            f"vocabulary {FAILS}sp=off or tp=1.",
        ),
    ],
)
def test_innermost_module_is_named(plan, message):
    model = Outer()
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 2))
    assert explain_failure(caught.value, model, Plan.parse(plan)) == message


def test_errors_outside_the_model_are_unchanged():
    assert explain_failure(ValueError("the loss"), Outer(), Plan.parse("tp=2")) is None


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Bypassed()


def train(plan: str, model: nn.Module) -> list[float]:
    """Return the losses of two steps."""
    mesh = build_mesh(Plan.parse(plan))
    parallelize(model, mesh)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.05), class_loss, mesh)
    return [float(step(batch_of(8, place, torch.float32)).loss) for place in range(2)]


@pytest.mark.parametrize("setting", ["recompute=full", "recompute=selective", "offload=activations"])
def test_gradients_of_torch_func_are_refused(setting):
    with pytest.raises(ModelError) as caught:
        train(setting, nn.Sequential(OfFunction(), OfFunction()))
    message = (
        rf"{setting}: the forward of [01] \(OfFunction\) calls torch.func.grad, vjp, jacrev or hessian, which torch"
    )
    assert re.match(message, str(caught.value)), str(caught.value)


class OfFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return x - torch.func.grad(lambda each: self.layer(each).square().sum())(x)


@pytest.mark.parametrize("zero", [2, 3])
def test_uncalled_block_trains_like_one_process(zero, ranks2):
    want = train("dp_replicate=1", seeded())
    for found in ranks2.run(train, f"dp_shard=2 zero={zero}", seeded()):
        assert found == pytest.approx(want, rel=1e-5)


def test_parameter_without_elements_under_zero3(ranks2):
    model = Bypassed()
    model.head.extra = nn.Parameter(torch.zeros(4, 0))
    with pytest.raises(RankError) as caught:
        ranks2.run(train, "dp_shard=2 zero=3", model)
    message = "zero=3: parameter head.extra has no elements, and fully_shard cannot reduce such a gradient. Use zero=2."
    assert caught.value.refusal == message


def test_first_step_chains_the_models_error_as_the_cause():
    model = Outer()
    step = TrainStep.__new__(TrainStep)
    step.model, step.has_trained = model, False
    step.mesh = type("OnPaper", (), {"plan": Plan.parse("tp=2")})()
    with pytest.raises(ModelError, match=r"^tp=2: inner \(Inner\) fails") as caught:
        explains_failures(lambda step, batch: step.model(batch))(step, torch.zeros(2))
    assert isinstance(caught.value.__cause__, RuntimeError)
    step.has_trained = True
    with pytest.raises(RuntimeError, match="is invalid for input"):
        explains_failures(lambda step, batch: step.model(batch))(step, torch.zeros(2))
