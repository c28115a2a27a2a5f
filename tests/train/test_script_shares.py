"""Scripts with unequal shares: `run.shard`, `run.train_step`, and refused settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftError
from weft.train.losses import expect_global_batch
from weft.train.shares.probe import probed_shares

NUM_SAMPLES, BATCH = 40, 16


def train(plan_text: str) -> tuple[list[float], torch.Tensor]:
    """Train a small network with dropout for an epoch, and return its losses and a weight."""
    plan = Plan.parse(f"{plan_text} precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=5)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 6).double(), torch.randn(NUM_SAMPLES, 1).double())
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 1)).double()
    model = run.parallelize(model)
    loader = run.shard(DataLoader(data, batch_size=BATCH, shuffle=True))

    def loss(output, batch):
        return ((output - batch[1]) ** 2).sum(), len(output)

    step = run.train_step(model, torch.optim.AdamW, loss, lr=0.01, max_grad_norm=1.0)
    losses = [step(batch).loss for batch in loader]
    return losses, model[0].weight.detach().clone()


@pytest.mark.parametrize("plan", ["dp_replicate=2 shares=3+1", "dp_shard=2 zero=2 shares=2+7 accumulation=2"])
def test_script_equals_one_process(plan, ranks2):
    losses, weight = train("")
    assert len(losses) == 3  # the last batch has 8 samples
    for found in ranks2.run(train, plan):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert torch.allclose(found[1], weight, rtol=1e-10)


def pass_own_batch(plan_text: str) -> str:
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=5)
    model = run.parallelize(nn.Linear(6, 1))
    step = run.train_step(model, torch.optim.SGD, lambda output, batch: (output.sum(), len(output)), lr=0.1)
    try:
        step((torch.ones(3, 6), torch.ones(3, 1)))
    except WeftError as error:
        return str(error)
    return ""


def test_batch_of_unknown_samples_is_refused(ranks2):
    for message in ranks2.run(pass_own_batch, "dp_replicate=2 shares=3+1"):
        assert message == (
            "shares=3+1: the samples of this batch are unknown, and ranks have unequal parts. Pass the DataLoader "
            "through run.shard, and its batches to the step unchanged."
        )


def norms_in_groups(plan_text: str) -> str:
    plan = Plan.parse(plan_text)
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=5)
    try:
        run.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), norm_group=4)
    except ModelError as error:
        return str(error)
    return ""


def test_groups_of_samples_are_refused(ranks2):
    for message in ranks2.run(norms_in_groups, "dp_replicate=2 shares=3+1"):
        assert message == "norm_group=4: groups of samples are built for equal parts of ranks. Leave shares out."
    with pytest.raises(WeftError) as caught:
        expect_global_batch(Plan.parse("dp_replicate=2 shares=3+1"))
    assert str(caught.value).startswith("shares: the loss compares all samples of the global batch")


def probe(plan_text: str) -> tuple[int, ...]:
    return probed_shares(build_mesh(Plan.parse(plan_text)))


def test_probe_gives_all_ranks_the_same_shares(ranks2):
    first, second = ranks2.run(probe, "dp_replicate=2 shares=auto")
    assert first == second
    assert len(first) in (0, 2)
