"""Tables in host memory or mapped files with a cache: the same numbers as in memory, with any size of the cache."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch

import weft
from tests.parallel.table_cases import STEPS, Script, TableCase, reference
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError, WeftError
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tables import host
from weft.parallel.tables.host import CachedRows, TableSettings

LIMIT = 1e-10
HOST = "{user,item,genre,seen,tags}=host"
MIXED = "user=host item=columns genre=replicate seen=one tags=rows"


@functools.cache
def expected(optimizer: str):
    return reference(TableCase("", "", optimizer))


def train(case: TableCase, cache: float, folder: str):
    script = Script(case, cache, folder)
    return script.train(0, case.steps), script.weights()


def assert_same(found, optimizer: str) -> None:
    (metrics, weights), (want, plain) = found, expected(optimizer)
    for ours, theirs in zip(metrics, want, strict=True):
        assert ours == pytest.approx(theirs, rel=LIMIT)
    for name, tensor in plain.items():
        assert float((weights[name] - tensor).abs().max()) <= LIMIT, name


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adamw", "adagrad", "sgd"])
@pytest.mark.parametrize("cache", [0.01, 0.4, 1.0])
def test_one_rank_equals_plain_torch(optimizer, cache, tmp_path):
    folder = str(tmp_path) if cache == 0.4 else ""
    assert_same(train(TableCase(HOST, "accumulation=3", optimizer), cache, folder), optimizer)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adamw"])
def test_two_ranks_equal_plain_torch(optimizer, tmp_path, ranks2):
    case = TableCase(HOST, "dp_shard=2 zero=1 accumulation=2", optimizer)
    for found in ranks2.run(train, case, 0.3, str(tmp_path)):
        assert_same(found, optimizer)


# Checkpoints.


def save_half(case: TableCase, folder: str, cache: float) -> None:
    script = Script(case, cache)
    script.train(0, STEPS // 2)
    script.run.save(folder, step=STEPS // 2, model=script.model, optimizer=script.step)


def resume(case: TableCase, folder: str, cache: float):
    script = Script(case, cache)
    script.train(5, 7)  # fills the cache with rows that the checkpoint replaces
    script.run.load(folder, model=script.model, optimizer=script.step)
    return script.train(STEPS // 2, STEPS), script.weights()


@pytest.mark.parametrize("styles", [(HOST, HOST), (HOST, MIXED), (MIXED, HOST)])
def test_checkpoint_resumes_under_other_styles(styles, tmp_path, ranks2):
    optimizer = "lazy_adamw"
    ranks2.run(save_half, TableCase(styles[0], "dp_replicate=2", optimizer), str(tmp_path), 0.4)
    for found in (
        resume(TableCase(styles[1], "", optimizer), str(tmp_path), 0.2),
        *ranks2.run(resume, TableCase(styles[1], "dp_shard=2 zero=2", optimizer), str(tmp_path), 0.5),
    ):
        metrics, weights = found
        assert [one for one, _ in metrics] == pytest.approx([one for one, _ in expected(optimizer)[0][5:]], rel=LIMIT)
        for name, tensor in expected(optimizer)[1].items():
            assert float((weights[name] - tensor).abs().max()) <= LIMIT, name


# The cache.


def test_cache_keeps_rows_that_are_read_again():
    weight = torch.arange(40.0).view(20, 2)
    cache = CachedRows(weight, 0.2, torch.device("cpu"))
    cache.read(torch.tensor([3, 7]), enters=True)
    for other in range(10, 20):  # rows that are read once
        assert torch.equal(cache.read(torch.tensor([3, 7, other]), enters=True), weight[[3, 7, other]])
    weight_before = weight.clone()
    cache.update(torch.tensor([3, 7]), [], lambda tensors, rows, mine: tensors[0].index_fill_(0, rows, -1.0))
    assert torch.equal(weight, weight_before)  # cached, so the host rows are old
    assert (cache.read(torch.tensor([7, 3]), enters=False) == -1).all()
    cache.flush()
    assert (weight[[3, 7]] == -1).all()


def test_cache_reads_rows_that_other_code_changed():
    weight = torch.zeros(10, 2)
    cache = CachedRows(weight, 0.5, torch.device("cpu"))
    cache.read(torch.arange(4), enters=True)
    weight[2] = 5.0
    assert cache.read(torch.tensor([2, 9]), enters=True).sum() == 10


def test_rows_that_leave_the_cache_are_current_before_their_write_ends(monkeypatch, tmp_path):
    write = host._write

    def slow_write(*args):
        time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(host, "_write", slow_write)
    weight = TableSettings(folder=str(tmp_path)).zeros((40, 2), torch.float32)
    cache = CachedRows(weight, 0.1, torch.device("cpu"))
    want = weight.clone()
    for start in (0, 4, 8, 0, 4, 20, 8):
        rows = torch.arange(start, start + 4)
        assert torch.equal(cache.read(rows, enters=True), want[rows])
        cache.read(rows + 16, enters=False)  # not cached
        cache.update(rows, [], lambda tensors, index, mine: tensors[0].index_add_(0, index, torch.ones(len(index), 2)))
        want[rows] += 1
    cache.flush()
    assert torch.equal(weight, want)


def test_failed_write_of_rows_is_reported(monkeypatch, tmp_path):
    def full(*args):
        raise OSError("no space")

    monkeypatch.setattr(host, "_write", full)
    cache = CachedRows(TableSettings(folder=str(tmp_path)).zeros((40, 2), torch.float32), 0.1, torch.device("cpu"))
    cache.read(torch.arange(4), enters=True)
    cache.update(torch.arange(4), [], lambda tensors, index, mine: tensors[0].index_fill_(0, index, 1.0))
    with pytest.raises(OSError, match="no space"):
        cache.flush()


@pytest.mark.parametrize("folder", ["", "mapped"])
def test_many_rows_in_parts_equal_a_plain_table(folder, tmp_path):
    settings = TableSettings(0.05, str(tmp_path) if folder else "")
    weight, sums = settings.zeros((20_000, 64), torch.float64), settings.zeros((20_000,), torch.float64)
    want = torch.randn(20_000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight.copy_(want)
    cache, want_sums = CachedRows(weight, settings.cache, torch.device("cpu")), torch.zeros_like(sums)
    cache.add(sums)

    def change(tensors, index, mine):
        for one in tensors:
            one.index_copy_(0, index, one.index_select(0, index) * 2 + 1)

    for step in range(6):
        rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(step))[:3000]
        assert torch.equal(cache.read(rows, enters=True), want[rows])
        cache.update(rows, [sums], change)
        want[rows], want_sums[rows] = want[rows] * 2 + 1, want_sums[rows] * 2 + 1
    cache.flush()
    assert torch.equal(weight, want)
    assert torch.equal(sums, want_sums)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="Linux lists mappings")
def test_mapped_file_is_read_in_random_order_except_for_checkpoints(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    mapped = TableSettings(folder=str(tmp_path)).zeros((5000, 8), torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before
    cache = CachedRows(mapped, 0.1, torch.device("cpu"))
    assert is_random(mapped)
    cache.flush()  # a checkpoint follows
    assert not is_random(mapped)
    cache.read(torch.arange(4), enters=True)
    assert is_random(mapped)


def is_random(mapped: torch.Tensor) -> bool:
    with open("/proc/self/smaps") as file:
        mapping = file.read().partition(f"{mapped.data_ptr():08x}-")[2]
    flags = next(line for line in mapping.splitlines() if line.startswith("VmFlags:"))
    return "rr" in flags.split()


def test_device_holds_only_the_cache():
    run = weft.Run(Plan(), build_mesh(Plan()), Ledger(), seed=0)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(5000, 8), torch.nn.Linear(8, 1))
    run.parallelize(model, layout="0=host", table_cache=0.02)
    run.train_step(
        model, torch.optim.AdamW, lambda output, batch: (output.sum(), len(output)),
        tables=weft.TableOptimizer("lazy_adamw"), check_batch=False,
    )(torch.arange(64))  # fmt: skip
    (table,) = data_parallel(model).tables
    assert [tuple(one.shape) for one in table.cache._cached] == [(100, 8)] * 3


# Errors.


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cache": 0.0}, "table_cache=0.0: a share of the rows is above 0 and at most 1. Use 0.05."),
        ({"cache": 1.5}, "table_cache=1.5: a share of the rows is above 0 and at most 1. Use 0.05."),
        ({"folder": "/no/such"}, "table_folder=/no/such: it is not a folder. Create it, or leave table_folder out."),
    ],
)
def test_unusable_settings_are_refused(settings, message):
    with pytest.raises(WeftError) as caught:
        TableSettings(**settings)
    assert str(caught.value) == message


def test_folder_without_space_is_refused(tmp_path):
    with pytest.raises(WeftError, match=r"no file of .* can be made there, because .*\. Use another folder\."):
        TableSettings(folder=str(tmp_path)).zeros((2**50,), torch.float32)
    assert not os.listdir(tmp_path)


def test_rows_that_other_code_changes_are_refused_while_the_cache_has_newer_ones():
    kept = torch.zeros(8, 2)
    cache = CachedRows(kept, 0.5, torch.device("cpu"))
    rows = torch.arange(3)
    cache.read(rows, True)
    cache.update(rows, [], lambda tensors, index, mine: tensors[0].index_add_(0, index, torch.ones(3, 2)))
    kept.mul_(0.5)
    with pytest.raises(ModelError, match="other code changed its weight"):
        cache.read(rows, True)
