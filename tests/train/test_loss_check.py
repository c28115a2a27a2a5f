"""Loss functions must return the sum and the number; errors show how to write it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftWarning
from weft.parallel.parallelize import parallelize
from weft.train.losses import CheckedLoss
from weft.train.step.train_step import TrainStep

OUTPUT = torch.randn(4, 3, requires_grad=True)
BATCH = (torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
FORM = (
    "Weft divides once, over all ranks and microbatches, so it needs the sum of the losses and how many there are. "
    'Write e.g.\n    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])'
)


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda o, b: F.cross_entropy(o, b[1]), f"loss_fn: it returned one number, like a mean. {FORM}"),
        (lambda o, b: o.sum(0)[:2], f"loss_fn: it returned one tensor of shape (2,). {FORM}"),
        (lambda o, b: None, f"loss_fn: it returned None. {FORM}"),
        (lambda o, b: (o.sum(), 4, 1), f"loss_fn: it returned a tuple of 3. {FORM}"),
        (lambda o, b: (o.sum().item(), 4), f"loss_fn: the sum of the losses that it returned is a float. {FORM}"),
        (
            lambda o, b: (o.sum(), b[1] >= 0),
            f"loss_fn: the number of losses that it returned is one tensor of shape (4,). {FORM}",
        ),
        (
            lambda o, b: (F.cross_entropy(o, b[1], reduction="none"), 4),
            "loss_fn: the losses that it returned are a tensor of shape (4,), and Weft needs their sum. "
            "Return losses.sum() and their number.",
        ),
        (
            lambda o, b: (o.detach().sum(), 4),
            "loss_fn: the sum that it returned has no gradient, because of .item(), .detach() or no_grad, or it "
            "does not depend on the model's trained parameters. Return the sum computed from the model's output.",
        ),
    ],
)
def test_common_mistakes_get_one_message(loss_fn, text):
    with pytest.raises(ModelError) as caught:
        CheckedLoss(loss_fn, warns_of_means=False)(OUTPUT, BATCH)
    assert str(caught.value) == text


@pytest.mark.parametrize("number", [4, 4.0, torch.tensor(4), True])
def test_sum_and_number_are_accepted(number):
    loss_sum, count = CheckedLoss(lambda o, b: [o.sum(), number], warns_of_means=True)(OUTPUT, BATCH)
    assert (loss_sum.item(), count) == (OUTPUT.sum().item(), number)


def pasted(text: str):
    """Return the function that an error message proposes."""
    found: dict[str, object] = {"F": F}
    exec("def loss_fn(output, batch):\n" + text.partition("Write\n")[2], found)
    return found["loss_fn"]


@pytest.mark.parametrize("loss_fn", [lambda o, b: (o.loss, 1), lambda o, b: (o.loss * len(b["labels"]), 1)])
def test_message_for_the_models_own_loss_contains_working_code(loss_fn):
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    ids = torch.randint(16, (2, 5))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == ids[0, 3], -100)}
    expected = model(**batch).loss.item()
    mesh = build_mesh(Plan())
    parallelize(model, mesh)

    def step_with(loss_fn):
        return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, mesh)

    with pytest.raises(ModelError) as caught:
        step_with(loss_fn)(batch)
    text = str(caught.value)
    assert text.startswith(
        "loss_fn: output.loss is None, because a train step keeps the batch's labels from the model: its own loss "
        "would be a mean over one rank's tokens. Weft divides once, over all ranks and microbatches, so it needs the "
        "sum of the losses and how many there are. Write\n"
    )
    assert step_with(pasted(text))(batch).loss == pytest.approx(expected, rel=1e-6)


def test_other_hugging_face_outputs_get_matching_code():
    batch = {"x": torch.zeros(4), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(ModelError) as caught:
        CheckedLoss(lambda o, b: (o.loss, 1), warns_of_means=True)(SequenceClassifierOutput(logits=OUTPUT), batch)
    loss_sum, number = pasted(str(caught.value))(SequenceClassifierOutput(logits=OUTPUT), batch)
    assert (loss_sum, number) == (F.cross_entropy(OUTPUT, batch["labels"], reduction="sum"), 4)


def test_error_in_user_code_is_unchanged():
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'logits'"):
        CheckedLoss(lambda o, b: (o.logits, 1), warns_of_means=False)(OUTPUT, BATCH)


def test_mean_loss_of_the_model_warns_once_if_it_differs():
    output = CausalLMOutputWithPast(loss=OUTPUT.mean(), logits=torch.zeros(1, 2, 3))
    loss = CheckedLoss(lambda o, b: (o.loss, 1), warns_of_means=True)
    with pytest.warns(WeftWarning, match="output.loss, a mean over the tokens of one rank's microbatch"):
        loss(output, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(output, {})
        CheckedLoss(lambda o, b: (o.loss, 1), warns_of_means=False)(output, {})
        CheckedLoss(lambda o, b: (o.loss * 6, 6), warns_of_means=True)(output, {})


def test_step_checks_its_loss():
    model = parallelize(nn.Linear(2, 3), mesh := build_mesh(Plan()))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda o, b: F.cross_entropy(o, b[1]), mesh)
    with pytest.raises(ModelError, match="it returned one number, like a mean"):
        step(BATCH)
