"""Rows that are fetched under the backward before give the same numbers, and are fetched again if they are others."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import weft
from tests.parallel.table_cases import Script, TableCase
from tests.parallel.test_tables import MIXED, assert_same
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.data.batches import versions_of
from weft.data.order.next_batches import with_next
from weft.errors import CommError, DataError, ModelError
from weft.parallel.tables import row_prefetch

ALL_ROWS = "{user,item,genre,seen,tags}=rows"
LAYOUTS = [MIXED, ALL_ROWS, "{user,seen}=host {item,genre,tags}=columns"]
PLANS = ["dp_replicate=2", "dp_shard=2 zero=2 accumulation=2"]


class Counted:
    """Counts prefetches whose rows are used, and those that are fetched again, while the context is open."""

    def __enter__(self) -> Counted:
        self.used, self.again, calls = 0, 0, row_prefetch.RowPrefetch.calls

        @functools.wraps(calls)
        def counted(prefetch, waiting):
            found = calls(prefetch, waiting)
            self.used, self.again = self.used + (found is not None), self.again + (found is None)
            return found

        self._before, row_prefetch.RowPrefetch.calls = calls, counted
        return self

    def __exit__(self, *error: object) -> None:
        row_prefetch.RowPrefetch.calls = self._before


def train(case: TableCase):
    script, found = Script(case, prefetch=True), []
    with Counted() as counts:
        for index in range(case.steps):
            following = script.batch(index + 1) if index + 1 < case.steps else None
            found.append(script.step(script.batch(index), next_batch=following))
    return ([(one.loss, one.grad_norm) for one in found], script.weights()), (counts.used, counts.again)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_prefetched_rows_equal_plain_torch(layout, plan, ranks2):
    case = TableCase(layout, plan, "lazy_adamw")
    for found, counts in ranks2.run(train, case):
        assert_same(found, case)
        microbatches = case.steps * Plan.parse(plan).accumulation
        assert counts == (microbatches - 1, 0)


def test_four_ranks_equal_plain_torch(ranks4):
    case = TableCase(ALL_ROWS, "dp_replicate=2 dp_shard=2 zero=1", "adagrad")
    for found, counts in ranks4.run(train, case):
        assert_same(found, case)
        assert counts == (case.steps - 1, 0)


# What may happen between two steps.


def steps_with(case: TableCase, prefetch: bool, expect, after):
    """Train 4 steps.

    Args:
        expect: expect(script, index, following) returns the next batch that a step is told.
        after: after(script, following) is called between steps.
    """
    script, found = Script(case, prefetch=prefetch), []
    batches = [script.batch(index) for index in range(4)]
    with Counted() as counts:
        for index, batch in enumerate(batches):
            following = batches[index + 1] if index < 3 else None
            done = script.step(batch, next_batch=following if index == 3 else expect(script, index, following))
            found.append((done.loss, done.grad_norm))
            if index < 3:
                after(script, following)
    return found, script.weights(), (counts.used, counts.again)


def as_it_comes(script: Script, index: int, following) -> object:
    return following


def another(script: Script, index: int, following) -> object:
    return script.batch(index + 7)


def on_one_rank(script: Script, index: int, following) -> object:
    return following if script.run.mesh.rank else None


def nothing(script: Script, following) -> None:
    pass


def set_ids(script: Script, following) -> None:
    for one, _ in following.counted():
        one["user"].add_(1).remainder_(7)


@torch.no_grad()
def set_rows(script: Script, following) -> None:
    for table in script.tables:
        table.weight.mul_(0.5)


def set_data(script: Script, following) -> None:
    for table in script.tables:
        table.weight.data.mul_(0.5)  # does not count as a new version


@torch.no_grad()
def evaluate(script: Script, following) -> None:
    for one, _ in script.batch(20).counted():
        script.model(one)


def save_or_load(folder, script: Script, following) -> None:
    """Save the first step, and load it after each other one."""
    objects = {"model": script.model, "optimizer": script.step}
    if script.run.load(folder, **objects) is None:
        script.run.save(folder, step=1, **objects)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "expect, after, counts",
    [
        (another, nothing, (0, 3)),
        (on_one_rank, nothing, (0, 0)),
        (as_it_comes, set_ids, (0, 3)),
        (as_it_comes, set_rows, (0, 3)),
        (as_it_comes, set_data, (0, 3)),
        (as_it_comes, evaluate, (3, 0)),
        (as_it_comes, save_or_load, (3, 0)),  # the other rows are those of the checkpoint
    ],
)
def test_rows_are_current(expect, after, counts, plan, ranks2, tmp_path):
    case = TableCase(MIXED, plan, "adagrad")
    inner = 4 * (Plan.parse(plan).accumulation - 1)
    folders = [functools.partial(after, tmp_path / name) if after is save_or_load else after for name in "ab"]
    plain = ranks2.run(steps_with, case, False, as_it_comes, folders[0])
    ours = ranks2.run(steps_with, case, True, expect, folders[1])
    for one, other in zip(plain, ours, strict=True):
        assert other[0] == one[0]
        assert all(torch.equal(other[1][name], value) for name, value in one[1].items())
        assert other[2] == (counts[0] + inner, counts[1])


def ids_out_of_range(prefetch: bool):
    script = Script(TableCase(ALL_ROWS, "dp_replicate=2"), prefetch=prefetch)
    first, second = script.batch(0), script.batch(1)
    second[0]["user"][0] = 10**6 * (1 - script.run.mesh.rank)
    script.step(first, next_batch=second)
    with pytest.raises((ModelError, CommError)) as error:
        script.step(second)
    third = script.step(script.batch(2))
    return str(error.value), third.loss


def test_wrong_id_is_reported_by_its_own_step(ranks2):
    assert ranks2.run(ids_out_of_range, True) == ranks2.run(ids_out_of_range, False)


class Recomputed(nn.Module):
    """A model of which one lookup runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = checkpoint(lambda one: self.first(one).tanh(), ids[:, 0], use_reentrant=False)
        return self.top(found + self.second(ids[:, 1])).squeeze(1)


def train_recomputed(prefetch: bool):
    plan = Plan.parse("dp_replicate=2 precision=fp64")
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    torch.manual_seed(0)
    model = run.parallelize(Recomputed().double(), layout="{first,second}=rows", table_prefetch=prefetch)
    step = run.train_step(
        model, torch.optim.Adagrad, lambda output, batch: (output.square().sum(), len(output)), lr=0.1
    )
    rng = torch.Generator().manual_seed(run.mesh.rank)
    batches = [torch.randint(9, (6, 2), generator=rng) for _ in range(5)]
    with Counted() as counts:
        losses = [step(one, next_batch=two).loss for one, two in with_next(batches)]
    return losses, counts.used


def test_recomputed_lookups_are_prefetched(ranks2):
    for (ours, used), (plain, _) in zip(
        ranks2.run(train_recomputed, True), ranks2.run(train_recomputed, False), strict=True
    ):
        assert ours == plain
        assert used == 4


def test_place_of_ids_in_a_batch():
    ids, dense = torch.arange(12).view(4, 3), torch.rand(4, 2)
    longer, other = torch.arange(100, 118).view(6, 3), torch.rand(6, 2)

    def place(tensor: torch.Tensor) -> torch.Tensor | None:
        return row_prefetch.same_place(tensor, [dense, ids], [other, longer])

    assert place(ids) is longer
    assert place(ids.view(-1)).equal(longer.view(-1))
    assert place(ids[:, 2]).equal(longer[:, 2])
    assert place(ids[:, 1:]).equal(longer[:, 1:])
    assert place(ids[:2]) is None, "not all rows"
    assert place(ids + 1) is None, "not a part of the batch"
    sparse = ids.to_sparse()
    assert row_prefetch.same_place(ids, [sparse, ids], [sparse, longer]) is longer
    assert row_prefetch.same_place(ids[:, 2], [ids], [longer[:0]]) is None
    assert row_prefetch.same_place(ids[:, 2], [ids], [longer.int()]) is None
    assert row_prefetch.same_place(ids[:, 2], [ids], [longer.view(9, 2)]) is None


def test_loader_with_next_counts_the_first_of_both():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    loader = run.shard(DataLoader(range(10), batch_size=4))
    pairs = loader.with_next()
    first, second = next(pairs)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert loader.state_dict() == {"epoch": 0, "next_batch": 1}
    assert [(one.tolist(), None if two is None else two.tolist()) for one, two in pairs] == [
        ([4, 5, 6, 7], [8, 9]), ([8, 9], None)
    ]  # fmt: skip
    assert loader.state_dict() == {"epoch": 1, "next_batch": 0}


def test_error_in_the_next_batch_comes_in_its_turn():
    def batches():
        yield 1
        yield 2
        raise ValueError("batch 3")

    pairs = with_next(batches())
    assert [next(pairs), next(pairs)] == [(1, 2), (2, None)]
    with pytest.raises(ValueError, match="batch 3"):
        next(pairs)


def test_with_next_yields_batches_that_are_none():
    assert list(with_next([None, 1, None])) == [(None, 1), (1, None), (None, None)]


def test_loader_with_one_buffer_is_refused():
    ids = torch.zeros(8)
    with pytest.raises(DataError, match="wrote the next batch into the memory of this one"):
        next(with_next(({"ids": ids.fill_(number)[:4]} for number in range(2)), versions_of))
