from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.stored import Stored, store
from weft.data.order.stream import IGNORED, Sample, SampleStream
from weft.errors import DataError

packings = st.sampled_from(["concat", "fit", "pad"])
documents = st.lists(st.integers(2, 25), min_size=1, max_size=15)


def expected(sample: Sample, sizes: list[int], flags: list[bool], packing: str, borders: bool) -> None:
    """Check a sample token by token. The ids are stream positions."""
    total, size = sum(sizes), sample.num_inputs
    owner = [number for number, length in enumerate(sizes) for _ in range(length)]
    places = sample.input_ids[:size].tolist()
    position = document = 0
    for step, place in enumerate(places):
        following = (place + 1) % total
        if step:
            assert place == (places[step - 1] + 1) % total
            new = owner[place] != owner[places[step - 1]] or place == 0
            position = 0 if new and borders else position + 1
            document += int(new and borders)
        assert sample.positions[step] == position
        assert sample.document_ids[step] == document
        crosses = owner[following] != owner[place] or following == 0
        hidden = crosses and (borders or (packing != "concat" and step == size - 1))
        assert sample.labels[step] == (IGNORED if hidden or not flags[following] else following)
    assert sample.has_border == (document > 0)
    assert (sample.labels[size:] == IGNORED).all()
    assert (sample.input_ids[size:] == 999_999).all()
    if size < sample.labels.size:
        assert (sample.document_ids[size:] == document + int(borders)).all()
        assert (sample.positions[size:] < sample.labels.size).all()


@settings(max_examples=150, deadline=None)
@given(sizes=documents, seq_len=st.integers(2, 12), packing=packings, borders=st.booleans(), data=st.data())
def test_every_sample_equals_the_slow_reference(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    seq_len: int,
    packing: str,
    borders: bool,
    data: st.DataObject,
) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes)))
    bounds = np.cumsum([0, *sizes])
    masks = [flags[first:last] for first, last in itertools.pairwise(bounds)]
    stored = store(tmp_path_factory.mktemp("s") / "train", sizes, masks=masks)
    stream = SampleStream([stored], seed=3, seq_len=seq_len, packing=packing, borders=borders)
    epoch = data.draw(st.integers(0, 5))
    inputs: list[int] = []
    for index in range(epoch * stream.num_sequences, (epoch + 1) * stream.num_sequences):
        sample = stream.sample(index)
        assert sample.epoch == epoch
        expected(sample, sizes, flags, packing, borders)
        inputs += sample.input_ids[: sample.num_inputs].tolist()
    assert len(inputs) == len(set(inputs))
    left_out = set(range(sum(sizes))) - set(inputs)
    assert left_out <= (set() if packing == "concat" else set((bounds[1:] - 1).tolist()))


@pytest.fixture
def sources(tmp_path: Path) -> list[Stored]:
    return [
        store(tmp_path / "a", [30, 12, 50], weight=1.0),
        store(tmp_path / "b", [5] * 72, weight=3.0),
    ]


def test_any_index_is_random_access_and_reproducible(sources: list[Stored]) -> None:
    def make(seed: int = 1) -> SampleStream:
        return SampleStream(sources, seed=seed, seq_len=8, packing="concat", borders=True)

    one, again = make(), make()
    for index in (10**12, 5, 0, 77):
        np.testing.assert_array_equal(one.sample(index).input_ids, again.sample(index).input_ids)
    other = make(seed=2)
    assert any((one.sample(index).input_ids != other.sample(index).input_ids).any() for index in range(8))


def test_epochs_have_other_orders_and_other_splits(tmp_path: Path) -> None:
    stream = SampleStream([store(tmp_path / "a", [100])], seed=0, seq_len=8, packing="concat", borders=True)
    first, second = (
        [int(stream.sample(epoch * stream.num_sequences + n).input_ids[0]) for n in range(stream.num_sequences)]
        for epoch in (0, 1)
    )
    assert first != second
    assert {start % 8 for start in first} != {start % 8 for start in second}


@pytest.mark.parametrize("packing", ["concat", "fit", "pad"])
def test_weights_are_shares_of_tokens(sources: list[Stored], packing: str) -> None:
    stream = SampleStream(sources, seed=0, seq_len=8, packing=packing, borders=True)
    tokens: Counter[int] = Counter()
    for index in range(4096):
        sample = stream.sample(index)
        tokens[sample.source] += sample.num_inputs
    assert tokens[1] / tokens.total() == pytest.approx(0.75, abs=0.03)


def test_unweighted_sources_finish_an_epoch_at_the_same_time(sources: list[Stored]) -> None:
    plain = [Stored(s.name, s.folder, s.counts) for s in sources]
    stream = SampleStream(plain, seed=0, seq_len=8, packing="concat", borders=True)
    assert stream.num_sequences == 12 + 45
    counts = stream.state_at(57 * 100)
    assert counts == pytest.approx({"0:a": 1200, "1:b": 4500}, abs=200)


def test_state_counts_the_samples_of_each_source(sources: list[Stored]) -> None:
    for shuffle in (True, False):
        stream = SampleStream(sources, seed=0, seq_len=8, packing="fit", borders=True, shuffle=shuffle)
        seen: Counter[int] = Counter()
        for index in range(300):
            assert stream.state_at(index) == {"0:a": seen[0], "1:b": seen[1]}
            seen[stream.sample(index).source] += 1


def test_unshuffled_reads_sources_in_stored_order(sources: list[Stored]) -> None:
    stream = SampleStream(sources, seed=0, seq_len=8, packing="concat", borders=True, shuffle=False)
    samples = [stream.sample(index) for index in range(stream.num_sequences)]
    for source in (0, 1):
        ids = np.concatenate([s.input_ids[: s.num_inputs] for s in samples if s.source == source])
        assert ids.tolist() == list(range(sources[source].counts.num_tokens))
    assert [s.source for s in samples] == sorted(s.source for s in samples)


def test_no_source() -> None:
    stream = SampleStream([], seed=0, seq_len=8, packing="concat", borders=True, shuffle=False)
    assert stream.num_sequences == 0
    assert stream.state_at(5) == {}
    with pytest.raises(DataError, match="at least one source"):
        SampleStream([], seed=0, seq_len=8, packing="concat", borders=True)
