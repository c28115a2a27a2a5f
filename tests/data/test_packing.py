from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.order.stream import ConcatSpans, TableSpans, fit_starts, open_spans, pad_starts, plan_path, write_plan

documents = st.lists(st.integers(2, 40), min_size=1, max_size=30)
lengths = st.integers(2, 17)


def offsets_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@settings(max_examples=200, deadline=None)
@given(sizes=documents, seq_len=lengths, data=st.data())
def test_concat_reads_every_token_once(sizes: list[int], seq_len: int, data: st.DataObject) -> None:
    total = sum(sizes)
    spans = ConcatSpans(total, seq_len)
    shift = data.draw(st.integers(0, total - 1))
    taken = [
        (start + step) % total
        for start, size in (spans.span(sequence, shift) for sequence in range(spans.num_sequences))
        for step in range(size)
    ]
    assert sorted(taken) == list(range(total))


def next_fit(sizes: list[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """The slow reference: sequences as lists of (document, first token, end token), filled one document at a time."""
    sequences: list[list[tuple[int, int, int]]] = []
    room = 0
    for document, size in enumerate(sizes):
        first = 0
        # While the rest is longer than a full sequence (whose last token may be only a label), cut a sequence off.
        while size - first > seq_len + 1:
            sequences.append([(document, first, first + seq_len)])
            first += seq_len
            room = 0
        if room < size - first - 1 or not sequences or room == 0:
            sequences.append([])
            room = seq_len
        sequences[-1].append((document, first, size))
        room -= min(room, size - first)
    return sequences


@settings(max_examples=300, deadline=None)
@given(sizes=documents, seq_len=lengths)
def test_fit_equals_the_slow_reference(sizes: list[int], seq_len: int) -> None:
    offsets = offsets_of(sizes)
    starts = fit_starts(offsets, seq_len)
    expected = [int(offsets[group[0][0]]) + group[0][1] for group in next_fit(sizes, seq_len)]
    assert starts.tolist() == [*expected, sum(sizes)]


@settings(max_examples=200, deadline=None)
@given(sizes=documents, seq_len=lengths)
@pytest.mark.parametrize("packing", ["fit", "pad"])
def test_tables_train_every_token_within_a_document_once(packing: str, sizes: list[int], seq_len: int) -> None:
    offsets = offsets_of(sizes)
    spans = TableSpans({"fit": fit_starts, "pad": pad_starts}[packing](offsets, seq_len), seq_len)
    inputs = [
        start + step
        for start, size in (spans.span(sequence) for sequence in range(spans.num_sequences))
        for step in range(size)
    ]
    ends = set((offsets[1:] - 1).tolist())
    assert len(inputs) == len(set(inputs))
    # Only end tokens may be left out: they are the label of the token before them.
    assert set(range(sum(sizes))) - set(inputs) <= ends
    if packing == "pad":
        for sequence in range(spans.num_sequences):
            start, size = spans.span(sequence)
            first, last = np.searchsorted(offsets, [start, start + size - 1], side="right")
            assert first == last


def test_documents_that_fit_are_never_split() -> None:
    assert fit_starts(offsets_of([5, 4, 8, 9]), 8).tolist() == [0, 9, 17, 26]
    assert pad_starts(offsets_of([5, 20, 9]), 8).tolist() == [0, 5, 13, 21, 25, 34]


def test_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    offsets = offsets_of([5, 4, 8])
    for packing in ("concat", "fit", "pad"):
        write_plan(tmp_path, packing, 8, offsets)
    assert [path.name for path in sorted(tmp_path.glob("*.npy"))] == ["fit-8-v1.npy", "pad-8-v1.npy"]
    loaded = open_spans(tmp_path, "fit", 8, offsets, 17)
    plan_path(tmp_path, "fit", 8).unlink()
    computed = open_spans(tmp_path, "fit", 8, offsets, 17)
    assert isinstance(loaded, TableSpans)
    assert isinstance(computed, TableSpans)
    assert loaded.starts.tolist() == computed.starts.tolist() == [0, 9, 17]
