from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.stored import store
from weft.data.token_files import SplitCounts, SplitReader, SplitWriter, verify_split
from weft.errors import DataError


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), shard_bytes=st.integers(4, 200), data=st.data())
def test_reads_match_writes_across_shards(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_bytes: int, data: st.DataObject
) -> None:
    total = sum(lengths)
    flags = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    bounds = np.cumsum([0, *lengths])
    masks = [flags[first:last] for first, last in itertools.pairwise(bounds)]
    stored = store(tmp_path_factory.mktemp("s") / "train", lengths, masks=masks, shard_bytes=shard_bytes)
    reader = SplitReader(stored.folder, stored.counts)
    start, length = data.draw(st.integers(0, total - 1)), data.draw(st.integers(1, total))
    places = [(start + step) % total for step in range(length)]
    assert reader.tokens(start, length).tolist() == places
    trained = reader.trained(start, length)
    assert (trained is None) == all(flags)
    if trained is not None:
        assert trained.tolist() == [int(flags[place]) for place in places]
    starts = {int(bound) for bound in bounds}
    expected = [d for d in range(1, length + 1) if (start + d) in starts or (start + d - total) in starts - {0}]
    assert reader.borders(start, length).tolist() == expected
    assert verify_split(stored.folder, stored.counts) == []


def test_borders_past_the_end_wrap_around(tmp_path: Path) -> None:
    reader = SplitReader((stored := store(tmp_path / "train", [2, 3])).folder, stored.counts)
    assert reader.borders(4, 3).tolist() == [1, 3]
    assert reader.borders(4, 1).tolist() == [1]
    assert reader.borders(1, 5).tolist() == [1, 4]


def test_small_vocabularies_use_two_bytes(tmp_path: Path) -> None:
    for vocab_size, num_bytes in ((65536, 2), (65537, 4)):
        writer = SplitWriter(tmp_path / str(vocab_size), vocab_size=vocab_size, with_mask=False)
        writer.append(np.array([vocab_size - 1]), None)
        writer.end_document()
        counts = writer.close()
        assert counts.files["tokens-00000.bin"][0] == num_bytes
        assert SplitReader(tmp_path / str(vocab_size), counts).tokens(0, 1).tolist() == [vocab_size - 1]


def test_damage_is_found(tmp_path: Path) -> None:
    stored = store(tmp_path / "train", [10, 20])
    file = stored.folder / "tokens-00001.bin"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    assert verify_split(stored.folder, stored.counts) == ["tokens-00001.bin does not match its digest"]
    file.write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"tokens-00001.bin has 52 bytes, and 56 were written"):
        SplitReader(stored.folder, stored.counts)
    file.unlink()
    assert verify_split(stored.folder, stored.counts) == ["tokens-00001.bin is missing"]


def test_counts_round_trip_through_json(tmp_path: Path) -> None:
    counts = store(tmp_path / "train", [3, 4], masks=[[True] * 3, [False] * 4]).counts
    assert SplitCounts.from_dict(counts.to_dict()) == counts
    assert (counts.num_tokens, counts.num_documents, counts.num_trained, counts.has_mask) == (7, 2, 3, True)
