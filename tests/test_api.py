"""The script API: `weft.init` and the methods of a Run. examples/01_adopt.py runs all of it on one and two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.errors import PlanError


def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch[1], reduction="sum"), output.numel()


def test_unsupported_plan_is_refused_by_its_rule():
    with pytest.raises(PlanError, match=r"activation offload is not supported under a pipeline yet"):
        weft.init("pp=2 offload=activations")


def test_plan_for_more_ranks_than_started_is_refused():
    with pytest.raises(PlanError, match=r"it needs 2 ranks .* but 1 .* started|plan needs 2 ranks"):
        weft.init("dp_replicate=2")


def test_misspelled_plan_is_refused_with_a_suggestion():
    with pytest.raises(PlanError, match=r"unknown plan field 'dp_shrad'. Did you mean 'dp_shard'\?"):
        weft.init("dp_shrad=4")


def test_optimizer_is_accepted_as_class_or_instance():
    with weft.init(device="cpu") as run:
        batch = (torch.randn(4, 3), torch.randn(4, 2))
        losses = []
        for make in (
            lambda model: run.train_step(model, torch.optim.SGD, loss_fn, lr=0.1, momentum=0.5),
            lambda model: run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), loss_fn),
        ):
            torch.manual_seed(0)
            step = make(run.parallelize(nn.Linear(3, 2)))
            losses.append([step(batch).loss for _ in range(3)])
        assert losses[0] == losses[1]
        assert losses[0][2] < losses[0][0]
        model = run.parallelize(nn.Linear(3, 2))
        with pytest.raises(PlanError, match="lr: the optimizer is built already"):
            run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, lr=0.2)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"weight_decy": 0.1}, "weight_decy=0.1: SGD has no such option. Did you mean 'weight_decay'?"),
        ({"max_grad_nrm": 1.0}, "max_grad_nrm=1.0: SGD has no such option. Did you mean 'max_grad_norm'?"),
        ({"betas": 3, "lr": 1}, "betas=3: SGD has no such option. Use some of lr, momentum, dampening, weight_decay, "),
    ],
)
def test_unknown_optimizer_option_is_one_error_line(option, text):
    with weft.init(device="cpu") as run, pytest.raises(PlanError) as caught:
        run.train_step(run.parallelize(nn.Linear(3, 2)), torch.optim.SGD, loss_fn, **option)
    assert str(caught.value).startswith(text)


def test_optimizer_with_any_options_gets_them():
    made = {}

    def make(params, **options):
        made.update(options)
        return torch.optim.SGD(params)

    with weft.init(device="cpu") as run:
        run.train_step(run.parallelize(nn.Linear(3, 2)), make, loss_fn, anything=3)
    assert made == {"anything": 3}


def test_forward_passes_inputs_of_any_form_to_the_model():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3, 2)

        def forward(self, x, *, scale):
            return self.mix(x) * scale

    with weft.init(device="cpu") as run:
        step = run.train_step(
            run.parallelize(TwoInputs()),
            torch.optim.SGD,
            lambda output, batch: (output.square().sum(), output.numel()),
            forward=lambda model, batch: model(batch["x"], scale=batch["s"]),
            lr=0.1,
        )
        assert step({"x": torch.randn(4, 3), "s": torch.ones(4, 1)}).num_tokens == 8


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"timeout": "soon"}, "timeout=soon: 'soon' is not a duration. Write a number and a unit, such as '15min'."),
        ({"warn_after": 0}, "warn_after=0: it must be more than 0 s. Use warn_after='30m'."),
    ],
)
def test_invalid_durations_are_refused_with_a_message(setting, text):
    with pytest.raises(PlanError) as caught:
        weft.init(device="cpu", **setting)
    assert str(caught.value) == text


def test_second_init_in_one_process_works():
    first, second = weft.init(device="cpu"), weft.init("dp_shard=1 accumulation=2", device="cpu", warn_after="90s")
    assert first.mesh is not second.mesh
    second.close()
    first.close()
