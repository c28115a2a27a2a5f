"""Dropout and noise of scripts: equal for any number of ranks and after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.choice import gate_runs, todays
from tests.train.dropping_scripts import KINDS, Attends, Net, Noisy, start, train, train_all
from weft.parallel.dropout.dropout_calls import calls_dropout

#: Noise of numpy's and Python's generators depends on a rank's microbatches and not on samples.
BY_POSITION = [name for name in KINDS if name != "noise"]
SOME = ["attends", "multi-head with weights", "encoder layer", "packed lstm", "noise of samples"]
OWN_LOOP = ["multi-head", "attends", "noise"]


@pytest.fixture(scope="module")
def one_process():
    return train_all("dp_replicate=1", [*KINDS])


def test_resumed_script_continues_with_equal_losses(one_process, tmp_path):
    for name in KINDS:
        folder = str(tmp_path / name)
        losses = train("dp_replicate=1", name, folder=folder, save_at=2) + train("dp_replicate=1", name, folder=folder)
        assert losses == pytest.approx(one_process[name], rel=1e-10), name


@pytest.mark.parametrize(
    ("plan", "names"),
    todays(
        gate_runs(
            [
                ("dp_replicate=2", BY_POSITION),
                ("dp_shard=2 zero=3 accumulation=2 recompute=selective", SOME),
                ("pp=2 microbatches=2", SOME[:3]),
            ],
            0,
            1,
        ),
        parts=2,
    ),
)
def test_two_ranks_drop_the_same_values_as_one(plan, names, one_process, ranks2):
    for found in ranks2.run(train_all, plan, names):
        for name, losses in found.items():
            assert losses == pytest.approx(one_process[name], rel=1e-10), name


def test_dropout_and_noise_change_losses(one_process):
    rates = [losses[1] for losses in one_process.values()]
    assert len({round(rate, 6) for rate in rates}) == len(rates)


def test_custom_loop_matches_one_process_and_resumes(tmp_path, ranks2):
    want = train_all("dp_replicate=1", OWN_LOOP, own_loop=True)
    for name in OWN_LOOP:
        parts = {"folder": str(tmp_path / name), "own_loop": True}
        losses = train("dp_replicate=1", name, save_at=2, **parts) + train("dp_replicate=1", name, **parts)
        assert losses == pytest.approx(want[name], rel=1e-10), name
    for found in ranks2.run(train_all, "dp_replicate=2", OWN_LOOP[:2], own_loop=True):
        for name, losses in found.items():
            assert losses == pytest.approx(want[name], rel=1e-10), name


def test_evaluations_use_the_same_noise_each_time():
    run = start("precision=fp64")
    model = run.parallelize(Net("noise").double())
    batch = {"x": torch.ones(4, 8, dtype=torch.float64), "labels": torch.ones(4, 1, dtype=torch.float64)}

    def loss_fn(output, batch):
        return F.mse_loss(output, batch["labels"], reduction="sum"), len(output)

    first, again = (run.evaluate(model, [batch, batch], loss_fn).loss for _ in range(2))
    assert first == again
    assert first != run.evaluate(model, [batch], loss_fn).loss  # each batch has different noise


class Masked(nn.Module):
    """Attention without dropout, as most models write it."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.0, is_causal=True)


class Layered(nn.Module):
    """Layer that is called like a function."""

    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return self.dropout(x)


class Rated(nn.Module):
    """Functional dropout at a rate that may be 0."""

    def __init__(self, rate: float):
        super().__init__()
        self.attn_drop = rate

    def forward(self, x):
        return F.dropout(x, self.attn_drop, self.training)


@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (Attends(), True),
        (Masked(), False),
        (Layered(), False),
        (Rated(0.1), True),
        (Rated(0.0), False),
        (Noisy(), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
        (nn.LSTM(2, 2, num_layers=1), False),
        (nn.Dropout2d(0.1), True),
        (nn.Linear(2, 2), False),
    ],
)
def test_code_with_dropout_is_detected(module, drops):
    assert calls_dropout(module) == drops


def test_in_place_dropout_writes_to_its_input():
    model = weft.init("dp_replicate=1", device="cpu").parallelize(nn.Sequential(nn.Dropout(0.5, inplace=True)))
    x = torch.ones(8, 8)
    assert model(x) is x
    assert 0 < int((x == 0).sum()) < 64


class Checkpointed(nn.Module):
    """Recompute with torch's own checkpoint function."""

    def __init__(self, recomputes: bool):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.recomputes = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True), recomputes

    def attend(self, x):
        return F.dropout(self.attention(x, x, x)[0], 0.3, self.training)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False) if self.recomputes else self.attend(x)


def test_model_with_own_recompute_repeats_its_dropout():
    grads = []
    for recomputes in (False, True):
        model = start("precision=fp64").parallelize(Checkpointed(recomputes).double())
        model(torch.ones(4, 3, 16, dtype=torch.float64).cumsum(1)).square().sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
