"""How batches of loaders are passed to a model without a `forward` argument."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from weft.errors import ModelError
from weft.train.batches.microbatches import call_model


def net(forward) -> nn.Module:
    """Return a module whose forward is this function without self."""
    return type("Net", (nn.Module,), {"forward": staticmethod(forward)})()


ONE, TWO, THREE = (torch.tensor(number) for number in (1, 2, 3))


def takes_one(x):
    return (x,)


def takes_mask(x, mask=None):
    return (x, mask)


def takes_two(a, b):
    return (a, b)


def takes_any(*inputs):
    return inputs


def takes_names(input_ids=None, attention_mask=None, labels=None, **more):
    return (input_ids, attention_mask, labels, more)


def takes_text(input_ids, attention_mask=None):
    return (input_ids, attention_mask)


@pytest.mark.parametrize(
    ("forward", "batch", "inputs"),
    [
        (takes_one, ONE, (ONE,)),
        (takes_one, (ONE, "label"), (ONE,)),
        (takes_one, [ONE, TWO], (ONE,)),
        (takes_one, [ONE, TWO, THREE], (ONE,)),
        (takes_one, ([ONE, TWO], THREE), ([ONE, TWO],)),
        (takes_mask, [ONE, TWO], (ONE, None)),
        (takes_two, [ONE, TWO, THREE], (ONE, TWO)),
        (takes_two, [ONE, TWO], (ONE, TWO)),
        (takes_any, [ONE, TWO], (ONE,)),
        (takes_names, [ONE, TWO], (ONE, None, None, {})),
        (takes_names, {"input_ids": ONE, "labels": TWO, "use": 3}, (ONE, None, None, {"use": 3})),
        (takes_text, {"input_ids": ONE, "attention_mask": TWO, "labels": THREE}, (ONE, TWO)),
        (takes_text, {"input_ids": ONE, "y": TWO}, (ONE, None)),
        (takes_text, BatchEncoding({"input_ids": ONE, "attention_mask": TWO, "labels": THREE}), (ONE, TWO)),
        (lambda x, labels: (x, labels), {"x": ONE, "labels": TWO}, (ONE, TWO)),
    ],
)
def test_inputs_are_passed_in_order_without_targets(forward, batch, inputs):
    assert call_model(net(forward), batch) == inputs


@pytest.mark.parametrize(
    ("forward", "batch", "text"),
    [
        (
            takes_names,
            [ONE, TWO, THREE],
            "batch: Net.forward takes (input_ids, attention_mask, labels, more), and the batch is a list of 3, so "
            "it is unclear which are inputs. Pass train_step(..., forward=lambda model, batch: model(batch[0], "
            "batch[1])).",
        ),
        (
            takes_two,
            ONE,
            "batch: Net.forward takes (a, b), and the batch is one tensor, so it is unclear which are inputs. Pass "
            "train_step(..., forward=lambda model, batch: model(...)).",
        ),
        (
            takes_text,
            {"input_ids": ONE, "attention_masks": TWO},
            "batch: Net.forward takes (input_ids, attention_mask), and the batch has input_ids, attention_masks, so "
            "it is unclear which are inputs. Pass train_step(..., forward=lambda model, batch: "
            'model(input_ids=batch["input_ids"], attention_mask=batch["attention_masks"])).',
        ),
        (
            takes_one,
            {"image": ONE, "labels": TWO},
            "batch: Net.forward takes (x), and the batch has image, labels, so it is unclear which are inputs. "
            'Pass train_step(..., forward=lambda model, batch: model(batch["image"])).',
        ),
        (
            takes_one,
            [{"x": ONE}, {"x": TWO}],
            "batch: a list of 2 dicts, and a batch is a tensor, or a tuple, list or dict of tensors. Stack the "
            "samples in the loader's collate_fn, pass microbatches as weft.Microbatches([...]), or pass "
            "forward=lambda model, batch: model(...).",
        ),
        (
            takes_one,
            ({"x": ONE}, {"x": TWO}),
            "batch: a tuple of 2 dicts, and a batch is a tensor, or a tuple, list or dict of tensors. Stack the "
            "samples in the loader's collate_fn, pass microbatches as weft.Microbatches([...]), or pass "
            "forward=lambda model, batch: model(...).",
        ),
        (
            takes_one,
            3,
            "batch of type int: a batch is a tensor, or a tuple, list or dict of tensors. "
            "Give forward=lambda model, batch: model(...) for anything else.",
        ),
    ],
)
def test_ambiguous_batch_raises_an_error_that_names_forward(forward, batch, text):
    with pytest.raises(ModelError) as caught:
        call_model(net(forward), batch)
    assert str(caught.value) == text
