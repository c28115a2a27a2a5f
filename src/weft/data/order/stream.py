"""Order of data, computed by pure functions. Nothing is shuffled in memory, so any position can be read directly.

A permutation is a Feistel network over the next power of two, applied until the result is in range (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002): fewer than two applications on average.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.data.token_files import SplitCounts, SplitReader, sync
from weft.errors import DataError

_MASK = 2**64 - 1
_MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_ROUNDS = 8


@lru_cache(maxsize=1024)
def derive_key(*parts: int | str) -> int:
    """Return a 64-bit hash of the parts, in order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A fixed permutation of range(size), computed per element from a 64-bit key."""

    def __init__(self, size: int, key: int):
        self.size = size
        bits = max(1, (size - 1).bit_length())
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = [derive_key(key, number) for number in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return the element at `index`, which is in range(size)."""
        while True:
            low, high = index & self._low_mask, index >> self._low_bits
            for number, key in enumerate(self._keys):
                if number % 2:
                    low ^= _scramble(high, key) & self._low_mask
                else:
                    high ^= _scramble(low, key) & self._high_mask
            index = high << self._low_bits | low
            if index < self.size:
                return index

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return the elements at an array of indices. int64 [n] -> int64 [n]."""
        result = np.array(indices, np.uint64)
        walking = np.arange(result.size)
        while walking.size:
            result[walking] = self._step(result[walking])
            walking = walking[result[walking] >= self.size]
        return result.astype(np.int64)

    def _step(self, index: np.ndarray) -> np.ndarray:
        low_bits, low_mask, high_mask = (np.uint64(n) for n in (self._low_bits, self._low_mask, self._high_mask))
        low, high = index & low_mask, index >> low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_scramble_array(high, key) & low_mask)
            else:
                high = high ^ (_scramble_array(low, key) & high_mask)
        return high << low_bits | low


def _scramble(value: int, key: int) -> int:
    value = (value ^ key) * _MULTIPLY_1 & _MASK
    value = (value ^ value >> 32) * _MULTIPLY_2 & _MASK
    return value ^ value >> 32


def _scramble_array(value: np.ndarray, key: int) -> np.ndarray:
    half = np.uint64(32)
    value = (value ^ np.uint64(key)) * np.uint64(_MULTIPLY_1)
    value = (value ^ (value >> half)) * np.uint64(_MULTIPLY_2)
    return value ^ (value >> half)


@lru_cache(maxsize=256)
def count_parts(num_shards: int, global_batch: int) -> int:
    """Return the largest divisor of the global batch for which equal parts use at least 95 % of the shards."""
    counts = range(min(num_shards, global_batch), 0, -1)
    return next(n for n in counts if global_batch % n == 0 and 20 * (num_shards // n * n) >= 19 * num_shards)


def permutation(size: int, *parts: int | str) -> Permutation:
    """Return the permutation of range(size) for a key of `parts`, such as a seed, a source and an epoch."""
    return Permutation(size, derive_key(*parts))


# Assignment of global samples to sources: a pure function of the sample index that reaches the exact shares.

#: Sum of the integer weights. Arithmetic with integers is exact at any index.
_SCALE = 2**32
_GRID = 4096


class Mixture:
    """Assignment of global sample indices to sources.

    Args:
        shares: positive sampling weights of the sources. Their sum may be any number.
        seed: seed of the order.
        block: number of samples that are permuted together.
    """

    def __init__(self, shares: Sequence[float], *, seed: int, block: int = 256):
        total = float(sum(shares))
        parts = [max(1, round(share / total * _SCALE)) for share in shares]
        parts[parts.index(max(parts))] += _SCALE - sum(parts)
        self._parts = parts
        self._seed, self._block = seed, block
        self._locate = lru_cache(maxsize=8)(self._block_table)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the index of the source that a global sample comes from, and the sample's index in that source."""
        if len(self._parts) == 1:
            return 0, index
        number, slot = divmod(index, self._block)
        sources, ordinals = self._locate(number)
        return int(sources[slot]), int(ordinals[slot])

    def counts_before(self, index: int) -> list[int]:
        """Return the number of samples of each source among the first `index`."""
        if len(self._parts) == 1:
            return [index]
        number, slot = divmod(index, self._block)
        counts = self._dealt(number * self._block)
        if slot:
            for source in self._locate(number)[0][:slot].tolist():
                counts[source] += 1
        return counts

    def _block_table(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        before, after = self._dealt(number * self._block), self._dealt((number + 1) * self._block)
        sizes = [last - first for first, last in zip(before, after, strict=True)]
        in_turn = np.repeat(np.arange(len(sizes)), sizes)
        sources = in_turn[permutation(self._block, "mixture", self._seed, number).take(np.arange(self._block))]
        ordinals = np.empty(self._block, np.int64)
        for source, first in enumerate(before):
            slots = np.flatnonzero(sources == source)
            ordinals[slots] = first + np.arange(slots.size)
        return sources, ordinals

    def _dealt(self, total: int) -> list[int]:
        """Return the number of samples of each source among the first `total` samples. The sum is `total`."""
        # Find by bisection the last tick (time step) at which at most `total` samples are due.
        low, high = max(0, total - len(self._parts) - 1) * _GRID, (total + len(self._parts) + 1) * _GRID
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(self._due(middle)) <= total else (low, middle - 1)
        counts, following = self._due(low), self._due(low + 1)
        for source in range(len(counts)):
            counts[source] += min(following[source] - counts[source], total - sum(counts))
        return counts

    def _due(self, tick: int) -> list[int]:
        """Return tick / _GRID * share, rounded to an integer, for each source."""
        return [(2 * tick * part + _GRID * _SCALE) // (2 * _GRID * _SCALE) for part in self._parts]


# Row counts of samples in tensors whose rows are not samples, such as patches of images.


def rows_of(samples: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Count the rows of each sample in tensors that a collate function concatenates, such as image patches.

    The result has one tuple of counts for each tensor, array or list in the samples, except if its length is 1 in all
    samples or 0 in all, or its counts equal an earlier tuple. The count is 0 for a sample without that item.
    """
    found: dict[tuple[int, ...], None] = {}
    for names in _columns(samples):
        counts = tuple(_length(_at(sample, names)) for sample in samples)
        if any(count != 1 for count in counts) and any(counts):
            found[counts] = None
    return tuple(found)


def _columns(samples: Sequence[Any]) -> list[Any]:
    """Return the keys or positions of the samples' items, or None for a sample that is not a container."""
    names: dict[Any, None] = {}
    for sample in samples:
        if isinstance(sample, Mapping):
            names.update(dict.fromkeys(sample))
        elif isinstance(sample, tuple | list):
            names.update(dict.fromkeys(range(len(sample))))
        else:
            names[None] = None
    return list(names)


def _at(sample: Any, name: Any) -> Any:
    if isinstance(sample, Mapping):
        return sample.get(name)
    if isinstance(sample, tuple | list):
        return sample[name] if isinstance(name, int) and name < len(sample) else None
    return sample if name is None else None


def _length(value: Any) -> int:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(value) if isinstance(value, list) else 0


# Packing of stored tokens into sequences: each packing maps a sequence index to a range of tokens (span).

_PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class ConcatSpans:
    """Spans of seq_len tokens. The stored tokens form a ring, which is split from a start that depends on the epoch."""

    num_tokens: int
    seq_len: int

    @property
    def num_sequences(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def span(self, sequence: int, shift: int) -> tuple[int, int]:
        """Return (first token, number of inputs). `shift` is the start of the epoch, in range(num_tokens)."""
        done = sequence * self.seq_len
        return (shift + done) % self.num_tokens, min(self.seq_len, self.num_tokens - done)


@dataclass(frozen=True, slots=True)
class TableSpans:
    """Spans from a table of starts, int64 [num_sequences + 1], whose last entry is the number of tokens."""

    starts: np.ndarray
    seq_len: int

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    def span(self, sequence: int, shift: int = 0) -> tuple[int, int]:
        """Return (first token, number of inputs). `shift` is ignored."""
        start = int(self.starts[sequence])
        return start, min(self.seq_len, int(self.starts[sequence + 1]) - start)


def fit_starts(offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the starts of next-fit packing in stored order, int64 [num_sequences + 1].

    A sequence takes complete documents while they fit. Longer documents are split every seq_len tokens. `offsets` is
    int64 [num_documents + 1].
    """
    starts = [0]
    position, total = 0, int(offsets[-1])
    while position < total:
        # + 1: the end token of the last document may be only a label and not an input.
        border = int(offsets[np.searchsorted(offsets, position + seq_len + 1, side="right") - 1])
        position = border if border > position else position + seq_len
        starts.append(position)
    return np.array(starts, np.int64)


def pad_starts(offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the starts of sequences with one document each, int64 [num_sequences + 1].

    Longer documents are split every seq_len tokens.
    """
    lengths = np.diff(offsets)
    num_pieces = np.maximum(1, -(-(lengths - 1) // seq_len))
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    inside = (np.arange(int(num_pieces.sum())) - first) * seq_len
    return np.append(np.repeat(offsets[:-1], num_pieces) + inside, offsets[-1]).astype(np.int64)


def plan_path(folder: Path, packing: str, seq_len: int) -> Path:
    return folder / f"{packing}-{seq_len}-v{_PLAN_VERSION}.npy"


def write_plan(folder: Path, packing: str, seq_len: int, offsets: np.ndarray) -> None:
    """Write the starts of the sequences of a packing (its plan) next to the split's shards, unless a valid plan exists.

    The caller must hold the split's lock.

    Args:
        folder: folder of the split's shards.
        packing: "concat" (which needs no plan), "fit" or "pad".
        seq_len: tokens of a sequence.
        offsets: start of each document and end of the last one, int64 (documents + 1,).
    """
    path = plan_path(folder, packing, seq_len)
    digest = path.with_suffix(".digest")
    if packing == "concat" or (path.exists() and digest.exists() and digest.read_text() == _digest(path)):
        return
    starts = (fit_starts if packing == "fit" else pad_starts)(offsets, seq_len)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with temporary.open("wb") as file:
        np.save(file, starts, allow_pickle=False)
    sync(temporary)
    digest.write_text(_digest(temporary))
    os.replace(temporary, path)
    sync(folder)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def open_spans(
    folder: Path, packing: str, seq_len: int, offsets: np.ndarray, num_tokens: int
) -> ConcatSpans | TableSpans:
    """Open the spans of a split from the file of `write_plan`, or compute them without one."""
    if packing == "concat":
        return ConcatSpans(num_tokens, seq_len)
    try:
        starts = np.load(plan_path(folder, packing, seq_len), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        starts = (fit_starts if packing == "fit" else pad_starts)(offsets, seq_len)
    return TableSpans(starts.view(np.ndarray), seq_len)


# Sequences in training order: sample(index) is a pure function of the seed and the global sample index.

IGNORED = -100


class StoredSource(Protocol):
    """The attributes of a source that a stream uses. `store.prepared.PreparedSource` has them."""

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

    Attributes:
        input_ids: the input tokens.
        labels: the next token, or -100 if it is not trained.
        positions: position of each token in its document, or in the sequence if `borders` is not set.
        document_ids: index of each token's document in the sequence, and a separate id for padding. All 0 if `borders`
            is not set.
        num_inputs: number of tokens that are not padding.
        has_border: whether a document starts inside the sequence and `borders` is set.
        source: index of the source.
        epoch: epoch of that source.
        weights: weights of the labels in the loss, float32 [T], or None if all are 1.
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
    """Arrays for samples, one per row: int64 [B, T], and optional label weights, float32 [B, T]."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    weights: np.ndarray | None = None

    @classmethod
    def empty(cls, num_rows: int, seq_len: int, *, weighted: bool = False) -> Rows:
        """Return arrays with arbitrary values. `weighted`: with label weights of 0."""
        ids, labels, positions, documents = (np.empty((num_rows, seq_len), np.int64) for _ in range(4))
        weights = np.zeros((num_rows, seq_len), np.float32) if weighted else None
        return cls(ids, labels, positions, documents, weights)


class _Source:
    def __init__(self, stored: StoredSource, number: int, packing: str | None, seq_len: int):
        self.packing = packing or stored.packing
        self.reader = SplitReader(stored.folder, stored.counts)
        self.spans = open_spans(stored.folder, self.packing, seq_len, self.reader.offsets, self.reader.num_tokens)
        self.number, self.pad_id, self.num_sequences = number, stored.pad_id, self.spans.num_sequences
        self.weight_table = stored.counts.weight_table


class SampleStream:
    """An endless stream of sequences from one source or several.

    Args:
        sources: sources of `PreparedData.train` or `.eval`.
        seed: seed of the order and the mixture.
        seq_len: tokens of a sequence.
        packing: data.packing of the config, or None for each source's packing.
        borders: data.borders of the config.
        shuffle: if False, sequences are in stored order, source after source. Weights are then ignored, and `sources`
            may be empty.

    Raises:
        DataError: if shards are missing or truncated, or `sources` is empty with shuffle.
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
        self.num_sources = len(sources)
        self._ends = np.cumsum([source.num_sequences for source in self._sources])
        self.num_sequences = int(self._ends[-1]) if self._sources else 0
        self.pad_id = sources[0].pad_id if sources else 0
        #: True if some tokens have a loss weight other than 0 and 1.
        self.is_weighted = any(stored.counts.weights for stored in sources)
        shares = [_sample_share(*pair) for pair in zip(sources, self._sources, strict=True)]
        self._mixture = Mixture(shares, seed=seed) if shuffle else None

    def sample(self, index: int) -> Sample:
        """Return a sample by its global index, from 0. The index determines the epoch."""
        rows = Rows.empty(1, self.seq_len, weighted=self.is_weighted)
        num_inputs, has_border = self.fill(rows, 0, index)
        source, epoch, _ = self._locate(index)
        return Sample(
            rows.input_ids[0], rows.labels[0], rows.positions[0], rows.document_ids[0],
            num_inputs, has_border, source, epoch, None if rows.weights is None else rows.weights[0],
        )  # fmt: skip

    def documents(self) -> np.ndarray:
        """Return the number of the document of each sequence in stored order, int64. For packing "pad"."""
        found, count = [np.zeros(0, np.int64)], 0
        for source in self._sources:
            assert isinstance(source.spans, TableSpans)
            found.append(np.searchsorted(source.reader.offsets, source.spans.starts[:-1], side="right") - 1 + count)
            count += len(source.reader.offsets) - 1
        return np.concatenate(found)

    def state_at(self, index: int) -> dict[str, int]:
        """Return the number of samples of each source, by name, before the global sample `index`."""
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
        """Return (source index, epoch of that source, sequence index in that epoch)."""
        if self._mixture is None:
            epoch, rest = divmod(index, self.num_sequences)
            number = int(np.searchsorted(self._ends, rest, side="right"))
            return number, epoch, rest - (int(self._ends[number]) - self._sources[number].num_sequences)
        number, ordinal = self._mixture.locate(index)
        source = self._sources[number]
        epoch, rest = divmod(ordinal, source.num_sequences)
        return number, epoch, permutation(source.num_sequences, "sequences", self.seed, number, epoch)(rest)

    def fill(self, rows: Rows, row: int, index: int) -> tuple[int, bool]:
        """Write a sample into one row, and return (number of inputs, True if a document starts inside).

        Args:
            rows: arrays of shape (rows, seq_len).
            row: index of the row to write.
            index: global sample index, from 0.
        """
        number, epoch, sequence = self._locate(index)
        source = self._sources[number]
        shift = 0
        if self.shuffle and source.packing == "concat":
            most = min(self.seq_len, source.reader.num_tokens)
            shift = derive_key("shift", self.seed, source.number, epoch) % most
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
            # With "fit" and "pad", documents do not continue in the next sequence, for any setting of `borders`.
            elif source.packing != "concat" and borders[-1] == size:
                labels[size - 1] = IGNORED
        self._write_positions(rows, row, size, borders[borders < size] if has_border else borders[:0])
        if size < self.seq_len:
            rows.input_ids[row, size:] = source.pad_id
            labels[size:] = IGNORED
        if rows.weights is not None:
            of_labels = 1.0 if trained is None else source.weight_table[trained[1:]]
            rows.weights[row] = 0.0
            rows.weights[row, :size] = np.where(labels[:size] == IGNORED, 0.0, of_labels)
        return size, has_border

    def _write_positions(self, rows: Rows, row: int, size: int, borders: np.ndarray) -> None:
        """Write positions and document ids of a row.

        borders: positions in 1 .. size - 1 at which documents start.
        """
        seq_len = self.seq_len
        positions, documents = rows.positions[row], rows.document_ids[row]
        positions[:] = np.arange(seq_len)
        documents[:] = 0
        edges = [*borders.tolist(), size] if self.borders and size < seq_len else borders.tolist()
        for number, edge in enumerate(edges, start=1):
            positions[edge:] = np.arange(seq_len - edge)
            documents[edge:] = number


def _sample_share(stored: StoredSource, source: _Source) -> float:
    """Return the share of samples that gives a source its share of the tokens, since padded sequences have fewer.

    Without a weight, return the number of sequences of the source.
    """
    if stored.weight is None:
        return float(source.num_sequences)
    return stored.weight * source.num_sequences / source.reader.num_tokens
