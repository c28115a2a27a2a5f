"""Sequences in training order: sample(index) is a pure function of the seed and the global sample index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.data.order.mixture import Mixture
from weft.data.order.packing import open_spans
from weft.data.order.sample_order import derive_key, permutation
from weft.data.shards import SplitCounts, SplitReader
from weft.errors import DataError

IGNORED = -100


class StoredSource(Protocol):
    """What a stream needs to know of a source; `prepare.PreparedSource` is one."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def counts(self) -> SplitCounts: ...
    @property
    def weight(self) -> float | None: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def packing(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of T = seq_len tokens, int64 [T] each.

    labels: the next token, or -100 where it is not trained. document_ids: 0, 1, ... in order; padding has its own.
    num_inputs: tokens that are not padding. has_border: whether a document starts inside, with borders on.
    weights: of the labels in the loss, float32 [T]; None where all are 1.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    num_inputs: int
    has_border: bool
    source: int
    epoch: int
    weights: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Arrays that samples are written into, row by row, int64 [B, T]; weights of the labels are float32, if any."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    weights: np.ndarray | None = None

    @classmethod
    def empty(cls, num_rows: int, seq_len: int, *, weighted: bool = False) -> Rows:
        ids, labels, positions, documents = (np.empty((num_rows, seq_len), np.int64) for _ in range(4))
        weights = np.zeros((num_rows, seq_len), np.float32) if weighted else None
        return cls(ids, labels, positions, documents, weights)


class _Source:
    """One source's sequences: its shards, its spans and its own order."""

    def __init__(self, stored: StoredSource, number: int, packing: str | None, seq_len: int):
        self.packing = packing or stored.packing
        self.reader = SplitReader(stored.folder, stored.counts)
        self.spans = open_spans(stored.folder, self.packing, seq_len, self.reader.offsets, self.reader.num_tokens)
        self.number, self.pad_id, self.num_sequences = number, stored.pad_id, self.spans.num_sequences
        self.weight_table = stored.counts.weight_table


class SampleStream:
    """An endless stream of sequences from one source or several.

    Args:
        sources: of `PreparedData.train` or `.eval`.
        seed: of the order and the mixture.
        seq_len: tokens of a sequence.
        packing: as in the data section; None takes each source's own.
        borders: as in the data section.
        shuffle: False gives the sequences in stored order, source after source; weights do not apply then, and there
            may
            be no source at all.

    Raises:
        DataError: for shards that are missing or cut off, and for shuffle without a source.
    """

    def __init__(
        self,
        sources: Sequence[StoredSource],
        *,
        seed: int,
        seq_len: int,
        packing: str | None,
        borders: bool,
        shuffle: bool = True,
    ):
        if shuffle and not sources:
            raise DataError("data.train: a run needs at least one source. Name one, or leave data.train out.")
        self.seed, self.seq_len, self.borders, self.shuffle = seed, seq_len, borders, shuffle
        self._sources = [_Source(stored, number, packing, seq_len) for number, stored in enumerate(sources)]
        self._names = [f"{number}:{stored.name}" for number, stored in enumerate(sources)]
        self._ends = np.cumsum([source.num_sequences for source in self._sources])
        self.num_sequences = int(self._ends[-1]) if self._sources else 0
        self.pad_id = sources[0].pad_id if sources else 0
        #: Whether labels have weights other than 1 somewhere.
        self.is_weighted = any(stored.counts.weights for stored in sources)
        shares = [_sample_share(*pair) for pair in zip(sources, self._sources, strict=True)]
        self._mixture = Mixture(shares, seed=seed) if shuffle else None

    def sample(self, index: int) -> Sample:
        """Return a sample by its global index, 0 and up; the epoch follows from it."""
        rows = Rows.empty(1, self.seq_len, weighted=self.is_weighted)
        num_inputs, has_border = self.fill(rows, 0, index)
        source, epoch, _ = self._locate(index)
        return Sample(
            rows.input_ids[0], rows.labels[0], rows.positions[0], rows.document_ids[0],
            num_inputs, has_border, source, epoch, None if rows.weights is None else rows.weights[0],
        )  # fmt: skip

    def state_at(self, index: int) -> dict[str, int]:
        """Count the samples taken from each source before `index`, by the source's name."""
        if self._mixture is None:
            epochs, rest = divmod(index, max(1, self.num_sequences))
            counts = []
            for source, end in zip(self._sources, self._ends.tolist(), strict=True):
                inside = min(max(0, rest - (end - source.num_sequences)), source.num_sequences)
                counts.append(epochs * source.num_sequences + inside)
        else:
            counts = self._mixture.counts_before(index)
        return dict(zip(self._names, counts, strict=True))

    def _locate(self, index: int) -> tuple[int, int, int]:
        """(source, epoch of that source, sequence in it)."""
        if self._mixture is None:
            epoch, rest = divmod(index, self.num_sequences)
            number = int(np.searchsorted(self._ends, rest, side="right"))
            return number, epoch, rest - (int(self._ends[number]) - self._sources[number].num_sequences)
        number, ordinal = self._mixture.locate(index)
        source = self._sources[number]
        epoch, rest = divmod(ordinal, source.num_sequences)
        return number, epoch, permutation(source.num_sequences, "sequences", self.seed, number, epoch)(rest)

    def fill(self, rows: Rows, row: int, index: int) -> tuple[int, bool]:
        """Write a sample into one row, and return (number of inputs, whether a document starts inside).

        Args:
            rows: arrays of shape (rows, seq_len).
            row: the row that is written.
            index: global sample index, 0 and up.
        """
        number, epoch, sequence = self._locate(index)
        source = self._sources[number]
        shift = self._shift(source, epoch)
        start, size = source.spans.span(sequence, shift)
        reader = source.reader
        tokens = reader.tokens(start, size + 1)
        trained = reader.trained(start, size + 1)
        rows.input_ids[row, :size] = tokens[:size]
        labels = rows.labels[row]
        labels[:size] = tokens[1:]
        if trained is not None:
            labels[:size][trained[1:] == 0] = IGNORED
        borders = reader.borders(start, size)
        has_border = False
        if borders.size:
            if self.borders:
                labels[borders - 1] = IGNORED
                has_border = bool(borders[0] < size)
            # In "fit" and "pad" the next sequence is another one, whatever the borders.
            elif source.packing != "concat" and borders[-1] == size:
                labels[size - 1] = IGNORED
        self._place(rows, row, size, borders[borders < size] if has_border else borders[:0])
        if size < self.seq_len:
            rows.input_ids[row, size:] = source.pad_id
            labels[size:] = IGNORED
        if rows.weights is not None:
            of_labels = 1.0 if trained is None else source.weight_table[trained[1:]]
            rows.weights[row] = 0.0
            rows.weights[row, :size] = np.where(labels[:size] == IGNORED, 0.0, of_labels)
        return size, has_border

    def _place(self, rows: Rows, row: int, size: int, borders: np.ndarray) -> None:
        """Positions and document ids. borders: where documents start inside, 1 .. size - 1."""
        seq_len = self.seq_len
        positions, documents = rows.positions[row], rows.document_ids[row]
        positions[:] = np.arange(seq_len)
        documents[:] = 0
        edges = [*borders.tolist(), size] if self.borders and size < seq_len else borders.tolist()
        for number, edge in enumerate(edges, start=1):
            positions[edge:] = np.arange(seq_len - edge)
            documents[edge:] = number

    def _shift(self, source: _Source, epoch: int) -> int:
        if not self.shuffle or source.packing != "concat":
            return 0
        return derive_key("shift", self.seed, source.number, epoch) % min(self.seq_len, source.reader.num_tokens)


def _sample_share(stored: StoredSource, source: _Source) -> float:
    """Share of the samples that gives the source its share of the tokens: padded sequences hold fewer."""
    if stored.weight is None:
        return float(source.num_sequences)
    return stored.weight * source.num_sequences / source.reader.num_tokens
