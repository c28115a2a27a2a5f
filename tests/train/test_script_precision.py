"""Inputs of loss functions under half precision, and models built in another dtype."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.train.dropping_scripts import start
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError, WeftWarning
from weft.train.losses import in_float32, needs_float32
from weft.train.tasks.decoder_loss import token_cross_entropy


def loss_fn(output, batch):
    """The loss of README.md."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def nested_loss_fn(output, batch):
    return loss_fn(output["logits"][0], batch)


class Nested(nn.Linear):
    def forward(self, x):
        return {"logits": (super().forward(x), None)}


def batch():
    torch.manual_seed(0)
    return torch.randn(256, 8), torch.randint(0, 128, (256,))


def layer(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    torch.manual_seed(1)
    return kind(8, 128)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("kind", "loss"), [(nn.Linear, loss_fn), (Nested, nested_loss_fn)])
def test_loss_of_half_outputs_is_not_rounded(precision, kind, loss):
    run = start(f"precision={precision}")
    model = run.parallelize(layer(kind))
    step = run.train_step(model, torch.optim.SGD, loss, lr=0.01, max_grad_norm=None)
    losses = [step(batch()).loss for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]  # the difference is below bfloat16's resolution
    assert losses[0] - losses[2] < 0.01
    after = run.evaluate(model, [batch()], loss).loss
    assert losses[2] - 0.01 < after < losses[2]
    # In a custom loop without train_step.
    own = loss(model(batch()[0]), batch())[0]
    assert own.dtype == torch.float32
    assert own.item() / 256 == pytest.approx(after, rel=1e-5)


def test_outputs_for_weft_losses_are_not_converted():
    half = Plan.parse("precision=bf16")
    assert not needs_float32(token_cross_entropy, half)
    assert not needs_float32(functools.partial(token_cross_entropy), half)
    assert needs_float32(functools.partial(loss_fn), half)
    assert needs_float32(weft.group_loss(2)(lambda own, group, places: (own[0].sum(), 1)), half)
    assert not needs_float32(loss_fn, Plan.parse("precision=fp32"))


def test_hugging_face_outputs_keep_their_type():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(logits=torch.ones(2, dtype=torch.bfloat16), past_key_values="cache")
    found = in_float32(output)
    assert type(found) is CausalLMOutputWithPast
    assert (found.logits.dtype, found.past_key_values, found.loss) == (torch.float32, "cache", None)
    assert output.logits.dtype == torch.bfloat16
    whole = {"a": torch.ones(2), "b": torch.arange(2)}
    assert in_float32(whole) is whole


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_float64_model_is_rejected_by_name(precision):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with pytest.raises(
        ModelError, match=rf"^precision={precision}: parameter '1.weight' is float64, .* Use precision=fp64, or call"
    ):
        start(f"precision={precision}").parallelize(model)


@pytest.mark.filterwarnings(f"ignore::{WeftWarning.__module__}.{WeftWarning.__name__}")
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", ["all", "one"])
def test_half_precision_model_trains_in_float32(cast, parts):
    run = start("dp_replicate=1")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 128))
    (model if parts == "all" else model[0]).to(cast)
    step = run.train_step(run.parallelize(model), torch.optim.SGD, loss_fn, lr=0.1)
    x, y = batch()
    losses = [step((x.to(cast), y)).loss for _ in range(3)]
    assert losses[0] > losses[2]


def test_gradient_norm_without_clipping():
    run = start("dp_replicate=1")
    model = run.parallelize(layer())
    assert run.train_step(model, torch.optim.SGD, loss_fn, max_grad_norm=None).max_grad_norm == 0.0
    with pytest.raises(PlanError, match=r"^max_grad_norm=-1: a norm is 0 or more. Use 1.0, or None for no clipping.$"):
        run.train_step(model, torch.optim.SGD, loss_fn, max_grad_norm=-1)
