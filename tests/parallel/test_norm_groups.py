"""Batch norm over groups of samples gives the same results for any distribution of a group over ranks."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from tests.parallel.loops import weights
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep

STEPS, SAMPLES = 3, 16


class Block(nn.Module):
    """A residual block with two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.second(self.norm(self.first(x)).relu()))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    tail = [nn.Flatten(), nn.Linear(4 * 9, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *blocks, *tail).double()


def data(step: int, count: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 2, 3, 3, generator=generator).double() * (step + 1), torch.randn(
        count, 3, generator=generator
    ).double()


def loss_fn(output: torch.Tensor, batch) -> tuple[torch.Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def train_reference(size: int, count: int = SAMPLES) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch: one forward per group, running statistics from the mean over a step's groups."""
    model = network().train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = data(step, count)
        before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
        statistics, outputs = [], []
        for norm in norms:
            norm.momentum = 1.0
        for part in x.split(size):
            outputs.append(model(part))
            statistics.append([(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms])
        (loss_fn(torch.cat(outputs), (x, y))[0] / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        for index, norm in enumerate(norms):
            norm.momentum = momenta[index]
            factor = norm.momentum or 1 / (step + 1)
            for which, buffer in enumerate((norm.running_mean, norm.running_var)):
                mean = torch.stack([one[index][which] for one in statistics]).mean(0)
                buffer.copy_(before[index][which] * (1 - factor) + mean * factor)
            norm.num_batches_tracked.fill_(step + 1)
    return model.state_dict()


def trained(plan: str, size: int, count: int = SAMPLES, ledger: Ledger | None = None) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"), record=(ledger or Ledger()).record)
    model = parallelize(network(), mesh, norm_group=size)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    for number in range(STEPS):
        step(Microbatches.of_rows(data(number, count), mesh.plan, mesh.data.rank))
    return weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}


def check(case: object, ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    assert set().union(*ranks) == expected.keys()
    for got in ranks:  # a pipeline stage has a part of the model
        for name, value in got.items():
            error = (value - expected[name]).abs().max().item()
            assert error < 1e-10, f"{case}: {name} differs by {error:.1e}"


@pytest.mark.parametrize(
    "plan, size",
    # No groups of 2: two normalized values are nearly +1 and -1, and rounding errors of gradients are amplified.
    [("", 16), ("", 4), ("accumulation=2", 4), ("accumulation=2 recompute=full", 8), ("accumulation=4", 4)],
)
def test_groups_in_one_process_match_plain_pytorch(plan, size):
    check(plan, [trained(plan, size)], train_reference(size))


PLANS2 = [
    ("dp_replicate=2", 16),
    ("dp_replicate=2", 8),
    ("dp_replicate=2", 4),
    ("dp_shard=2 zero=3", 16),
    ("dp_shard=2 zero=2 accumulation=2", 8),
    ("dp_shard=2 zero=1 recompute=full", 16),
    ("dp_replicate=2 recompute=selective accumulation=4", 4),
    ("pp=2 microbatches=2", 8),
    ("pp=2 microbatches=4 recompute=full", 4),
]


def train_many(cases: list[tuple[str, int, int]]) -> list[dict[str, torch.Tensor]]:
    return [trained(*case) for case in cases]


def test_groups_over_two_ranks_match_plain_pytorch(ranks2):
    cases = [(plan, size, SAMPLES) for plan, size in PLANS2]
    # Uneven: with 14 samples, groups of 4 span two ranks. Also a group larger than the batch.
    cases += [("dp_replicate=2", 4, 14), ("dp_shard=2 zero=3", 6, 14), ("dp_replicate=2", 32, 14)]
    for case, *ranks in zip(cases, *ranks2.run(train_many, cases), strict=True):
        check(case, ranks, train_reference(*case[1:]))


def train_and_list_axes(cases: list[tuple[str, int, int]]) -> tuple[list[dict[str, torch.Tensor]], list[set[str]]]:
    """Return the weights of each case, and the axes over which statistics were gathered."""
    found, axes = [], []
    for plan, size, count in cases:
        ledger = Ledger()
        found.append(trained(plan, size, count, ledger))
        axes.append({axis for axis, name, _ in ledger.rows() if name == "all_gather" and "dp" in axis})
    return found, axes


def test_group_statistics_are_gathered_over_its_ranks_only(ranks4):
    cases = [
        ("dp_replicate=4", 8, 16),  # two ranks per group
        ("dp_replicate=2 dp_shard=2", 16, 16),
        ("dp_replicate=4", 4, 16),  # one group per rank: no communication
        ("dp_replicate=4 accumulation=2", 4, 16),
        ("dp_replicate=4", 4, 7),
        ("dp_replicate=4 accumulation=2", 4, 6),  # two placeholders
        ("dp_replicate=2 pp=2 microbatches=2", 8, 16),
    ]
    answers = ranks4.run(train_and_list_axes, cases)
    for index, case in enumerate(cases):
        check(case, [found[index] for found, _ in answers], train_reference(*case[1:]))
    assert answers[0][1][:3] == [{"dp_replicate/2*dp_shard"}, {"dp_replicate*dp_shard"}, set()]


def stepped(model: nn.Module, plan: str, size: int, batch: object, loss=loss_fn) -> nn.Module:
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    model = parallelize(model, mesh, norm_group=size)
    TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, mesh)(batch)
    return model


def test_skipped_step_keeps_running_statistics():
    x, y = data(0)
    before = network().state_dict()
    model = stepped(network(), "", 4, (x, y * torch.nan))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name])


def test_frozen_statistics_are_used_and_unchanged():
    model = network()
    frozen = model[1].norm.eval()
    frozen.running_mean += 0.5
    before = frozen.running_mean.clone()
    trained_model = stepped(model, "", 4, data(0))
    torch.testing.assert_close(trained_model[1].norm.running_mean, before)
    assert not torch.allclose(trained_model[1].last.running_mean, torch.zeros(4).double())


def test_rows_are_grouped_by_their_sample():
    """Samples have different numbers of frames, and the norm's rows are frames."""
    sizes = [1, 3, 2, 4]
    x = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Sequential(nn.BatchNorm1d(5)).double()
    expected = torch.cat([copy.deepcopy(model)(part) for part in x.split([4, 6])])  # two samples per group
    outputs = []

    def loss(output: torch.Tensor, batch: object) -> tuple[torch.Tensor, int]:
        outputs.append(output.detach())
        return output.square().sum(), len(output)

    stepped(model, "", 2, Microbatches([x], [range(4)], [[tuple(sizes)]], 4), loss)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-12, atol=1e-12)


REFUSED = {
    "a microbatch holds samples 0 to 3 of the global batch over all ranks, and a group must be in one microbatch. "
    "Use a norm_group that divides 4, or fewer microbatches": ("accumulation=4", 8, data(0)),
    "this rank's microbatch has parts of groups, and the other parts are unknown": (
        "", 4, Microbatches([data(0)], [range(2, 18)], total=18),
    ),
    "a group of the global batch is one sample, with one value per channel": ("", 4, data(0, 13)),
    "it is a number of samples. Use 1 or more, such as 32": ("", -1, data(0)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_ungroupable_batches_are_rejected(text):
    plan, size, batch = REFUSED[text]
    with pytest.raises(ModelError, match="^norm_group=.*" + re.escape(text)):
        stepped(network(), plan, size, batch)


def test_user_loop_is_rejected_and_evaluation_is_allowed():
    model = parallelize(network(), build_mesh(Plan.parse("precision=fp64")), norm_group=4)
    with pytest.raises(ModelError, match=r"only run\.train_step passes the sample numbers"):
        model.train()(data(0)[0])
    assert model.eval()(data(0)[0]).shape == (SAMPLES, 3)
