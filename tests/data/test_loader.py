from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.stored import store
from weft.data.order.loader import Batch, EvalBatches, Loader
from weft.data.order.stream import SampleStream
from weft.errors import DataError


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> SampleStream:
    folder = tmp_path_factory.mktemp("stored")
    sources = [store(folder / "a", [30, 12, 50, 7], weight=1.0), store(folder / "b", [9] * 40, weight=2.0)]
    return SampleStream(sources, seed=5, seq_len=8, packing="concat", borders=True)


def global_batch(
    stream: SampleStream, step: int, size: int, dp_size: int, accumulation: int
) -> dict[str, torch.Tensor]:
    """Return all ranks' microbatches of a step, concatenated in the order of global samples."""
    rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "positions": []}
    loaders = [
        Loader(stream, global_batch=size, accumulation=accumulation, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    batches = [loader.batches(step) for loader in loaders]
    for microbatch in range(accumulation):
        for rank in range(dp_size):
            for name, parts in rows.items():
                parts.append(batches[rank][microbatch][name])
    return {name: torch.cat(parts) for name, parts in rows.items()}


@settings(max_examples=30, deadline=None)
@given(step=st.integers(0, 10**9), dp_size=st.sampled_from([1, 2, 4]), accumulation=st.sampled_from([1, 2, 4]))
def test_batches_are_equal_at_any_number_of_ranks(
    stream: SampleStream, step: int, dp_size: int, accumulation: int
) -> None:
    alone = global_batch(stream, step, 16, 1, 1)
    shared = global_batch(stream, step, 16, dp_size, accumulation)
    for name, tensor in alone.items():
        assert torch.equal(tensor, shared[name])


def test_microbatches_have_the_documented_samples(stream: SampleStream) -> None:
    loader = Loader(stream, global_batch=12, accumulation=3, dp_rank=1, dp_size=2)
    batches = loader.batches(7)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 8)] * 3
    for number, batch in enumerate(batches):
        for row in range(2):
            sample = stream.sample(7 * 12 + (number * 2 + 1) * 2 + row)
            assert batch["input_ids"][row].tolist() == sample.input_ids.tolist()
            assert batch["labels"][row].tolist() == sample.labels.tolist()
            assert batch["positions"][row].tolist() == sample.positions.tolist()
            assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_document_ids_require_borders_within_a_sequence(tmp_path: Path) -> None:
    full = SampleStream([store(tmp_path / "a", [64])], seed=0, seq_len=8, packing="fit", borders=True)
    cut = SampleStream([store(tmp_path / "b", [4] * 16)], seed=0, seq_len=8, packing="fit", borders=True)
    free = SampleStream([store(tmp_path / "c", [4] * 16)], seed=0, seq_len=8, packing="fit", borders=False)
    keys = [
        set(Loader(s, global_batch=4, accumulation=1, dp_rank=0, dp_size=1).batches(0)[0]) for s in (full, cut, free)
    ]
    plain = {"input_ids", "labels", "positions"}
    assert keys == [plain, plain | {"document_ids", "document_starts"}, plain]


def test_resume_at_any_step_gives_the_same_batches(stream: SampleStream) -> None:
    def loader() -> Loader:
        return Loader(stream, global_batch=8, accumulation=2, dp_rank=0, dp_size=2)

    with loader().iterate(0, 12) as full:
        steps = list(full)
    for start in (0, 1, 5, 11):
        with loader().iterate(start, 12) as rest:
            for before, after in zip(steps[start:], rest, strict=True):
                for one, other in zip(before, after, strict=True):
                    assert all(torch.equal(one[name], other[name]) for name in one)


def test_impossible_division_is_refused(stream: SampleStream) -> None:
    with pytest.raises(DataError) as caught:
        Loader(stream, global_batch=10, accumulation=2, dp_rank=0, dp_size=2)
    assert str(caught.value) == (
        "train.global_batch=10: not a multiple of 4 (2 data-parallel ranks times 2 microbatches). "
        "Use train.global_batch=12."
    )


class _Failing(Loader):
    def batches(self, step: int) -> list[Batch]:
        if step == 3:
            raise DataError("shard: gone. Prepare again.")
        return super().batches(step)


def test_error_in_the_thread_is_raised_at_its_step(stream: SampleStream) -> None:
    steps = _Failing(stream, global_batch=4, accumulation=1, dp_rank=0, dp_size=1).iterate(0, 9)
    for _ in range(3):
        next(steps)
    with pytest.raises(DataError, match="gone"):
        next(steps)
    with pytest.raises(StopIteration):
        next(steps)
    steps.close()


def test_close_ends_the_thread_at_any_time(stream: SampleStream) -> None:
    loader = Loader(stream, global_batch=4, accumulation=1, dp_rank=0, dp_size=1)
    for taken in range(4):
        steps = loader.iterate(0, 10**9)
        for _ in range(taken):
            next(steps)
        steps.close()
        steps.close()
        with pytest.raises(StopIteration):
            next(steps)
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-prefetch"]


@pytest.mark.parametrize("num_samples", [None, 1, 5, 20, 1000])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_evaluation_reads_each_sample_once_in_equal_numbers_of_calls(
    tmp_path: Path, num_samples: int | None, dp_size: int
) -> None:
    sources = [store(tmp_path / "a", [90]), store(tmp_path / "b", [200], first_id=1000)]
    stream = SampleStream(sources, seed=0, seq_len=8, packing="concat", borders=True, shuffle=False)
    ranks = [
        EvalBatches(stream, num_samples=num_samples, num_rows=3, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert {len(calls) for calls in batches} == {len(ranks[0])}
    rows = [
        tuple(row)
        for calls in batches
        for batch in calls
        for row in torch.cat([batch["input_ids"], batch["labels"]], 1).tolist()
        if row[0] != 999_999
    ]
    assert len(rows) == len(set(rows)) == min(37, num_samples or 37) == ranks[0].num_samples
    padding = [batch["labels"][batch["input_ids"][:, 0] == 999_999] for calls in batches for batch in calls]
    assert all((labels == -100).all() for labels in padding)
    if num_samples == 20:
        # Both sources have their share: 12 of 37 sequences are the first one's.
        assert sum(row[0] < 1000 for row in rows) == 7


def test_evaluation_without_data(tmp_path: Path) -> None:
    stream = SampleStream([], seed=0, seq_len=8, packing="concat", borders=True, shuffle=False)
    assert list(EvalBatches(stream, num_samples=8, num_rows=2, dp_rank=0, dp_size=1)) == []


def test_document_starts_match_document_ids(tmp_path: Path) -> None:
    stream = SampleStream(
        [store(tmp_path / "a", [3, 5, 4, 4, 9, 7])], seed=0, seq_len=16, packing="concat", borders=True
    )
    batch = Loader(stream, global_batch=2, accumulation=1, dp_rank=0, dp_size=1).batches(0)[0]
    for ids, starts in zip(batch["document_ids"].tolist(), batch["document_starts"].tolist(), strict=True):
        expected = [0, *(place for place in range(1, 16) if ids[place] != ids[place - 1])]
        assert starts == expected + [16] * (len(starts) - len(expected))
