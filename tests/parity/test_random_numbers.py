"""weft.randn_like and similar functions in forward give the same numbers under every plan and after a resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.parallel.loops import weights
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.parallelize import parallelize
from weft.parallel.random.streams import integers_at
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep

DIM, TOKENS, SAMPLES = 8, 6, 8


class Block(nn.Module):
    """Draws random numbers between its layers, where tp shards features, twice in one forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.1)

    def forward(self, x):
        h = F.gelu(self.up(x))
        h = h + 0.1 * weft.randn_like(h)
        h = h * weft.bernoulli(h, 0.9)
        return x + self.drop(self.down(h))


class Noisy(nn.Module):
    """A diffusion model: random times, noise and mask, then blocks that draw random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.times = nn.Linear(DIM, DIM), nn.Embedding(10, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x):
        t = weft.randint_like(x[:, 0, 0], 0, 10, dtype=torch.long)
        x = self.embed(x + weft.randn_like(x)) + self.times(t)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x * (weft.rand_like(x) > 0.2))


class Images(nn.Module):
    """Draws random numbers of image shape and of scalar shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, DIM)

    def forward(self, x):
        image = x.unflatten(2, (2, 4)).permute(0, 2, 1, 3)[:, :1]
        y = self.conv(image + weft.randn_like(image)) * (1 + weft.rand_like(x.new_zeros(())))
        return self.last(y.mean((2, 3)))[:, None].expand(x.shape)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(SAMPLES, TOKENS, DIM, generator=generator).double() for _ in range(2))


def loss_fn(output, batch):
    noise = weft.rand_like(batch[1][:, 0, 0])[:, None, None]
    return (output - batch[1] * noise).square().sum(), output.numel()


def trained(plan: str, kind: type[nn.Module] = Noisy, first: int = 0, model: nn.Module | None = None):
    """Train steps `first` to 1. torch's generator is seeded differently per plan, which must not matter."""
    torch.manual_seed(hash(plan) % 1000)
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    layout = weft.Layout.parse("blocks.*.up=colwise blocks.*.down=rowwise") if "tp" in plan else None
    model = parallelize((model or kind()).double(), mesh, seed=4, layout=layout)
    drops_of(model).num_keys = first
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    losses = []
    for number in range(first, 2):
        losses.append(step(Microbatches.of_rows(batch(number), mesh.plan, mesh.data.rank)).loss)
    return weights(model), losses


def trained_all(plans: list[str], kind: type[nn.Module] = Noisy):
    return [trained(plan, kind) for plan in plans]


def check(plan: str, got, expected) -> None:
    assert got[1] == pytest.approx(expected[1], rel=1e-12), plan
    for name, value in got[0].items():
        torch.testing.assert_close(value, expected[0][name], rtol=1e-10, atol=1e-12, msg=f"{plan} {name}")


ONE = ["accumulation=2", "recompute=full", "recompute=selective accumulation=4", "compile=on"]
TWO = [
    "dp_replicate=2", "dp_shard=2 zero=3", "dp_shard=2 zero=2 accumulation=2 recompute=full", "pp=2 microbatches=2",
    "pp=2 microbatches=4 recompute=full", "tp=2", "tp=2 recompute=full",
]  # fmt: skip


def test_random_numbers_match_on_one_rank():
    expected = trained("")
    assert expected[1][0] != expected[1][1]
    for plan in ONE:
        check(plan, trained(plan), expected)
    check("images", trained("accumulation=4", Images), trained("", Images))


def test_random_numbers_match_on_two_ranks(ranks2):
    expected = trained("")
    for answer in ranks2.run(trained_all, TWO):
        for plan, got in zip(TWO, answer, strict=True):
            check(plan, got, expected)
    for [got] in ranks2.run(trained_all, ["dp_shard=2 zero=3"], Images):
        check("images", got, trained("", Images))


def test_resumed_run_continues_the_random_numbers():
    mesh = build_mesh(Plan.parse("precision=fp64"))
    model = parallelize(Noisy().double(), mesh, seed=4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    step(batch(0))
    resumed = Noisy().double()
    resumed.load_state_dict(weights(model))
    check("resumed", trained("", first=1, model=resumed), (trained("")[0], trained("")[1][1:]))


def test_outside_a_step_the_functions_equal_torch():
    x = torch.full((3, 4), 0.5)
    torch.manual_seed(0)
    ours = weft.randn_like(x), weft.rand_like(x), weft.randint_like(x, 7), weft.bernoulli(x), weft.bernoulli(x, 0.1)
    torch.manual_seed(0)
    theirs = (
        torch.randn_like(x), torch.rand_like(x), torch.randint_like(x, 7), torch.bernoulli(x), torch.bernoulli(x, 0.1)
    )  # fmt: skip
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    model = parallelize(Noisy(), build_mesh(Plan())).eval()
    torch.manual_seed(1)
    first = model(batch(0)[0].float())
    assert not torch.equal(first, model(batch(0)[0].float()))
    torch.manual_seed(1)
    assert torch.equal(first, model(batch(0)[0].float()))


def test_random_integers_are_uniform_and_independent():
    positions = [torch.arange(400), torch.arange(500)]
    numbers = integers_at(torch.tensor(5), positions, 53).double() / 2**53
    assert 0 <= numbers.min() < 1e-4 < 1 - 1e-4 < numbers.max() < 1
    counts = torch.histc(numbers, 100, 0, 1)
    assert (
        (counts - 2000).square() / 2000
    ).sum() < 160  # chi-square with 99 degrees of freedom exceeds 160 once in 10,000
    normal = torch.special.ndtri((numbers + 2**-54).clamp(max=1 - 2**-53))
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1) < 0.02
    rows, columns = (normal - normal.mean()), (normal - normal.mean())
    assert (rows[1:] * rows[:-1]).mean().abs() < 0.01
    assert (columns[:, 1:] * columns[:, :-1]).mean().abs() < 0.01
    assert len(integers_at(torch.tensor(5), positions, 62).unique()) == 200_000
    assert not torch.equal(numbers, integers_at(torch.tensor(6), positions, 53).double() / 2**53)


class Wrong(nn.Module):
    """Draws random numbers that cannot follow samples. kind: how."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(DIM, DIM)

    def forward(self, x):
        if self.kind == "rows":
            return self.layer(x) + weft.randn_like(x.flatten()[: len(x) + 1]).sum()
        return checkpoint(lambda y: self.layer(y) * weft.randn_like(y), x, use_reentrant=False)


@pytest.mark.parametrize(
    "kind, message",
    [("rows", "a tensor of 9 rows in a microbatch of 8 samples"), ("checkpoint", "in a forward that backward replays")],
)
def test_random_numbers_unrelated_to_samples_are_rejected(kind, message):
    mesh = build_mesh(Plan.parse("precision=fp64"))
    model = parallelize(Wrong(kind).double(), mesh)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, mesh)
    with pytest.raises(ModelError, match=message):
        step(batch(0))
