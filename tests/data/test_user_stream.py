"""Streams of users: equal global batches for any number of ranks and workers, resuming, and uneven ends."""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import weft
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.data.order.stream import count_parts
from weft.data.order.user_stream import StreamLoader
from weft.errors import DataError, WeftWarning
from weft.train.batches.microbatches import from_loader


class Plain(IterableDataset[Any]):
    """A stream without shards, which divides itself among workers like many examples in the documentation of torch."""

    def __init__(self, count: int):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return iter([100 * self.epoch + number for number in range(self.count)][first::step])


class Sharded(Plain):
    """A stream of shards of these lengths. `opened` has the shards that were read."""

    def __init__(self, lengths: list[int], own: range | None = None, opened: set[int] | None = None):
        super().__init__(0)
        self.lengths, self.own = lengths, range(len(lengths)) if own is None else own
        self.opened: set[int] = set() if opened is None else opened

    @property
    def num_shards(self) -> int:
        return len(self.own)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.lengths, self.own[index::num_shards], self.opened)

    def __iter__(self):
        for shard in self.own:
            self.opened.add(shard)
            yield from (10_000 * self.epoch + 100 * shard + number for number in range(self.lengths[shard]))


class Total:
    """The sum over ranks, which are threads."""

    def __init__(self, num_ranks: int):
        self._barrier, self._values = threading.Barrier(num_ranks, timeout=60), [0] * num_ranks

    def of(self, rank: int):
        def total(number: int) -> int:
            self._values[rank] = int(number)
            self._barrier.wait()
            found = sum(self._values)
            self._barrier.wait()
            return found

        return total


def loaders(
    source, global_batch: int, num_ranks: int, *, workers: int = 0, microbatches: int = 1, repeat: bool = False
):
    total = Total(num_ranks)
    return [
        StreamLoader(
            source, global_batch, rank, num_ranks, collate_fn=torch.tensor, num_workers=workers, repeat=repeat,
            num_microbatches=microbatches, as_batch=from_loader, total=total.of(rank),
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def workers_start_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and a worker may fail if two threads fork at once."""
    lock, start = threading.Lock(), BaseProcess.start

    def start_alone(process: BaseProcess) -> None:
        with lock:
            start(process)

    monkeypatch.setattr(BaseProcess, "start", start_alone)


def read(ranks, most: int = 99) -> list[list[int]]:
    """Return the global batches of one epoch, composed of those of all ranks, which have equal numbers of them."""

    def batches(loader) -> list[dict[int, int]]:
        found = []
        for batch in loader:
            pairs: dict[int, int] = {}
            parts = batch if loader._numbers[1:] else [batch]
            for numbers, part in zip(loader._numbers, parts, strict=True):
                pairs |= dict(zip(numbers, part.tolist(), strict=False))
            found.append(pairs)
            if len(found) == most:
                break
        return found

    with warnings.catch_warnings(), ThreadPoolExecutor(len(ranks)) as pool:
        warnings.simplefilter("ignore", WeftWarning)
        own = list(pool.map(batches, ranks))
    steps = zip(*own, strict=True)
    return [[value for _, value in sorted(item for one in step for item in one.items())] for step in steps]


@pytest.mark.parametrize(
    ("source", "number"), [(lambda: Plain(26), 3), (lambda: Sharded([7] * 6), 5)], ids=["plain", "shards"]
)
def test_batches_do_not_depend_on_ranks_workers_and_microbatches(source, number):
    wanted = read(loaders(source(), 8, 1))
    assert [len(batch) for batch in wanted] == [8] * number
    for num_ranks, workers, microbatches in ((2, 0, 1), (3, 0, 1), (4, 0, 2), (8, 0, 1), (2, 2, 1), (1, 3, 2)):
        ranks = loaders(source(), 8, num_ranks, workers=workers, microbatches=microbatches)
        assert read(ranks) == wanted, (num_ranks, workers, microbatches)


def test_each_rank_reads_only_the_shards_of_its_samples():
    wanted = read(loaders(Sharded([6] * 8), 4, 1))
    numbers = sorted(number for batch in wanted for number in batch)
    assert numbers == [100 * shard + number for shard in range(8) for number in range(6)]
    ranks = [loaders(Sharded([6] * 8), 4, 2)[rank] for rank in range(2)]
    ranks[0]._total = ranks[1]._total = lambda number: number
    for rank, loader in enumerate(ranks):
        list(loader)
        assert loader._parts.source.opened == {2 * rank, 2 * rank + 1, 2 * rank + 4, 2 * rank + 5}


@pytest.mark.parametrize(
    "source", [Plain(26), Sharded([7] * 6), Sharded([3, 9, 5, 6])], ids=["plain", "even", "uneven"]
)
@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_resumes_at_every_position_under_other_ranks(source, repeat):
    wanted = read(loaders(source, 4, 1, repeat=repeat), 8)
    assert len(wanted) == 8 or not repeat
    for position in range(len(wanted)):
        (first,) = loaders(source, 4, 1, repeat=repeat)
        read([first], position) if position else None
        state = first.state_dict()
        assert (state["epoch"], state["next_batch"]) == (0, position)
        ranks = loaders(source, 4, 2, repeat=repeat)
        for one in ranks:
            one.load_state_dict(state)
        assert read(ranks, len(wanted) - position) == wanted[position:]
    if not repeat:
        read([first])
        assert (first.epoch, first.next_batch) == (1, 0)
    with pytest.raises(DataError, match=r"global_batch=8: the stream's state was saved with 4, and its samples would"):
        loaders(source, 8, 1)[0].load_state_dict(state)


def test_skip_is_used_and_epochs_are_counted():
    class Skipping(Plain):
        def skip(self, num_samples: int):
            self.skipped = num_samples
            return list(self)[num_samples:]

    source = Skipping(8)
    (loader,) = loaders(source, 4, 1)
    loader.load_state_dict({"epoch": 2, "next_batch": 1, "global_batch": 4, "parts": 1})
    assert read([loader]) == [[204, 205, 206, 207]]
    assert source.skipped == 4
    assert read([loader]) == [[300, 301, 302, 303], [304, 305, 306, 307]]


def test_parts_of_later_epochs_have_their_order():
    """Like the transforms of `datasets`, `shard` and `skip` return a stream at epoch 0."""

    class Skipping(Plain):
        def __init__(self, count: int, first: int = 0):
            super().__init__(count)
            self.first = first

        def skip(self, num_samples: int) -> Skipping:
            return Skipping(self.count, num_samples)

        def __iter__(self):
            return itertools.islice(super().__iter__(), self.first, None)

    for source, late in ((Sharded([2, 2]), [[20_001, 20_101]]), (Skipping(4), [[202, 203]])):
        (loader,) = loaders(source, 2, 1)
        loader.load_state_dict({"epoch": 2, "next_batch": 1})
        assert read([loader]) == late


def test_parts_have_almost_equal_numbers_of_shards():
    counts = {(1024, 32): 32, (57, 32): 8, (6, 8): 2, (7, 32): 1, (31, 30): 30, (8, 4): 4, (5, 1): 1}
    assert {pair: count_parts(*pair) for pair in counts} == counts


def test_uneven_ends_are_reported():
    (loader,) = loaders(Sharded([3, 9]), 4, 1)
    text = "the stream ends after 1 global batches. The next one has only 3 of 4 samples, because some part has no more"
    with pytest.warns(WeftWarning, match=text):
        assert [batch.tolist() for batch in loader] == [[0, 1, 100, 101]]
    (even,) = loaders(Sharded([4, 4]), 4, 1)
    assert len(list(even)) == 2  # a warning would be an error


def test_unusable_streams_are_refused():
    for source, rule in (
        (iter([1]), "a list_iterator cannot be read a second time"),
        (3, "a int cannot be read a second time"),
        (DataLoader(Plain(4)), "it is a DataLoader. Pass its dataset"),
    ):
        with pytest.raises(DataError, match=rule):
            loaders(source, 4, 1)
    with pytest.raises(DataError, match="global_batch=2: fewer samples than the 4 data-parallel ranks"):
        loaders(Plain(4), 2, 4)
    with pytest.raises(DataError, match="part 0 of 1 has no sample"):
        list(loaders(Plain(0), 2, 1, repeat=True)[0])
    divided = Plain(4)
    divided._distributed = object()
    with pytest.raises(DataError, match="split_dataset_by_node has divided it"):
        loaders(divided, 4, 1)


def test_streams_of_the_datasets_package_are_divided_by_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    files = [tmp_path / f"{number}.txt" for number in range(4)]
    for number, file in enumerate(files):
        file.write_text("".join(f"{100 * number + line}\n" for line in range(6)))
    stream = datasets.load_dataset(
        "text", data_files=[str(file) for file in files], split="train", streaming=True, cache_dir=str(tmp_path)
    ).map(lambda row: {"number": int(row["text"])})  # fmt: skip
    assert stream.num_shards == 4

    def ranks(num_ranks: int, workers: int = 0):
        found = loaders(stream, 4, num_ranks, workers=workers)
        for one in found:
            one._collate._collate = lambda rows: torch.tensor([row["number"] for row in rows])
        return found

    wanted = read(ranks(1))
    assert wanted == [[100 * shard + line for shard in range(4)] for line in range(6)]
    assert read(ranks(2)) == wanted
    assert read(ranks(1, workers=2)) == wanted
    (late,) = ranks(1)
    late.load_state_dict({"epoch": 0, "next_batch": 4})
    assert read([late]) == wanted[4:]


class Points(Sharded):
    def __iter__(self):
        for number in super().__iter__():
            yield torch.tensor([number % 7, number % 3], dtype=torch.float64), torch.tensor([number % 5.0]).double()

    def shard(self, num_shards: int, index: int) -> Points:
        return Points(self.lengths, self.own[index::num_shards], self.opened)


def losses_of(plan: str) -> list[float]:
    parsed = Plan.parse(f"{plan} precision=fp64")
    run = weft.Run(parsed, build_mesh(parsed), Ledger(), seed=0)
    torch.manual_seed(0)
    model = run.parallelize(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    step = run.train_step(model, torch.optim.SGD, lambda y, b: (((y - b[1]) ** 2).sum(), y.shape[0]), lr=0.02)
    loader, found = run.loader(Points([5, 3, 4, 6]), 4), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)
        for _ in range(2):
            found += [float(step(batch).loss) for batch in loader]
    return found


def test_losses_equal_those_of_one_process(ranks2):
    wanted = losses_of("dp_replicate=1")
    assert len(wanted) == 6
    for plan in ("dp_replicate=2", "dp_shard=2 zero=3", "dp_replicate=2 accumulation=2", "dp_replicate=1 tp=2"):
        for found in ranks2.run(losses_of, plan):
            assert found == pytest.approx(wanted, rel=1e-12), plan
