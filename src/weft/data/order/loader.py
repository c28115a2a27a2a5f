"""Batches of one rank. The rank's samples are a function of the step, so resuming needs one integer.

B = sequences in a microbatch, T = seq_len.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from weft.config import partitioning as shares
from weft.data.order.stream import IGNORED, Rows, Sample, SampleStream
from weft.data.text.tokenizer import Tokenizer
from weft.errors import DataError

Batch = dict[str, torch.Tensor]
_PREFETCH = 2


class Loader:
    """The microbatches of one data-parallel rank.

    In step s, its sample indices are the result of `weft.config.partitioning.microbatch_samples`, each increased by
    s * global_batch.

    Args:
        stream: the samples.
        global_batch: samples per step, over all ranks.
        accumulation: microbatches per rank and step.
        dp_rank: this rank's position on the data-parallel axes.
        dp_size: number of ranks on them.
        pin: whether to allocate tensors in pinned memory.
        timeline: shares of the ranks by step; None for equal parts.

    Raises:
        DataError: if parts are equal and the global batch is not divisible into microbatches.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        global_batch: int,
        accumulation: int,
        dp_rank: int,
        dp_size: int,
        pin: bool = False,
        timeline: shares.ShareTimeline | None = None,
    ):
        unit = shares.batch_unit(dp_size, accumulation)
        self._timeline = timeline or shares.ShareTimeline()
        if not any(weights for _, weights in self._timeline.changes) and global_batch % unit:
            raise DataError(
                f"train.global_batch={global_batch}: not a multiple of {unit} "
                f"({dp_size} data-parallel ranks times {accumulation} microbatches). "
                f"Use train.global_batch={-(-global_batch // unit) * unit}."
            )
        self._stream, self._global_batch, self._pin = stream, global_batch, pin
        self._division = global_batch, dp_size, accumulation, dp_rank

    def batches(self, step: int) -> list[Batch]:
        """Return the microbatches of optimizer step `step`, which starts at 0."""
        first = step * self._global_batch
        return [
            build_batch(self._stream, range(first + own.start, first + own.stop), len(own), pin=self._pin)
            for own in shares.microbatch_samples(*self._division, self._timeline.at(step))
        ]

    def iterate(self, start_step: int, end_step: int) -> Prefetch:
        """Return the microbatches of steps start_step .. end_step - 1, built ahead in a thread.

        Close the result, or use it in `with`.
        """
        return Prefetch(self, start_step, end_step)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of an epoch, or None for several sources, which have separate epochs."""
        return self._stream.num_sequences if self._stream.num_sources == 1 else None

    def state_at(self, num_samples: int) -> dict[str, int]:
        """Return the number of samples of each source, by name, among the first `num_samples`."""
        return self._stream.state_at(num_samples)


class EvalBatches:
    """A fixed evaluation set, spread evenly over the sources, with each sample once.

    The set is equal for any number of ranks. All ranks get the same number of batches. Rows after the end of the set
    are padding without labels.

    Args:
        stream: a stream with shuffle=False.
        num_samples: maximum number of samples, or None for all.
        num_rows: sequences in a batch of one rank.
        dp_rank: this rank's position on the data-parallel axes.
        dp_size: number of ranks on them.
        pin: whether to allocate tensors in pinned memory.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        num_samples: int | None,
        num_rows: int,
        dp_rank: int,
        dp_size: int,
        pin: bool = False,
    ):
        total = stream.num_sequences
        self.num_samples = total if num_samples is None else min(num_samples, total)
        self._stream, self._total, self._num_rows, self._pin = stream, total, num_rows, pin
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def __len__(self) -> int:
        per_call = self._num_rows * self._dp_size
        return (self.num_samples + per_call - 1) // per_call

    def __iter__(self) -> Iterator[Batch]:
        for call in range(len(self)):
            first = (call * self._dp_size + self._dp_rank) * self._num_rows
            last = min(first + self._num_rows, self.num_samples)
            indices = [number * self._total // self.num_samples for number in range(first, last)]
            yield build_batch(self._stream, indices, self._num_rows, pin=self._pin)


def build_batch(stream: SampleStream, indices: range | list[int], num_rows: int, *, pin: bool = False) -> Batch:
    """Build a batch of int64 (B, T) tensors: input_ids, labels, positions.

    If the stream separates documents and one starts inside a row, the batch also has document_ids, int64 (B, T), and
    document_starts, int64 (B, M), the positions at which documents begin, padded with T. M is a power of two, to limit
    the number of shapes. If that is T, M is T + 1. If the stream is weighted, the batch also has the label weights,
    float32 (B, T). Rows without an index are padding, and their labels are all -100.

    Args:
        stream: the samples.
        indices: global sample indices, at most `num_rows`.
        num_rows: number of rows B.
        pin: whether to allocate tensors in pinned memory.
    """
    rows = Rows.empty(num_rows, stream.seq_len, weighted=stream.is_weighted)
    has_border = False
    for row, index in enumerate(indices):
        has_border |= stream.fill(rows, row, index)[1]
    for row in range(len(indices), num_rows):
        rows.input_ids[row], rows.labels[row], rows.document_ids[row] = stream.pad_id, IGNORED, 0
        rows.positions[row] = np.arange(stream.seq_len)
    arrays = {"input_ids": rows.input_ids, "labels": rows.labels, "positions": rows.positions}
    if has_border:
        arrays["document_ids"] = rows.document_ids
        arrays["document_starts"] = _starts(rows.document_ids)
    if rows.weights is not None:
        arrays["weights"] = rows.weights
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if pin else batch


def _starts(ids: np.ndarray) -> np.ndarray:
    """Return the start positions of documents (B, M), padded with T, from their ids (B, T): 0, 1, ... in each row."""
    num_rows, seq_len = ids.shape
    most = 1 << int(ids[:, -1].max()).bit_length()
    most += most == seq_len  # context parallelism would shard a tensor whose dim 1 is seq_len
    found = np.full((num_rows, most), seq_len, np.int64)
    found[:, 0] = 0
    row, place = np.nonzero(np.diff(ids, axis=1))
    found[row, ids[row, place + 1]] = place + 1
    return found


class StepBatches(Protocol):
    """Source of the microbatches of any step."""

    def batches(self, step: int) -> list[Any]: ...


class Prefetch:
    """Iterator that builds batches in a thread, two steps ahead. Errors of the thread are raised by `next`.

    Args:
        loader: builds the batches of each step.
        start_step: the first step.
        end_step: the step after the last.
    """

    def __init__(self, loader: StepBatches, start_step: int, end_step: int):
        self._queue: queue.Queue[list[Any] | BaseException | None] = queue.Queue(maxsize=_PREFETCH)
        self._closed = threading.Event()
        self._finished = False
        self._thread = threading.Thread(
            target=self._work, args=(loader, start_step, end_step), name="weft-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> list[Any]:
        if self._finished or self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, list):
            return item
        self._finished = True
        self._thread.join()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop the thread and wait until it has ended. Closing it again has no effect."""
        self._closed.set()
        while self._thread.is_alive():
            # The thread may be waiting for space in the queue.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.02)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, loader: StepBatches, start_step: int, end_step: int) -> None:
        try:
            for step in range(start_step, end_step):
                if not self._put(loader.batches(step)):
                    return
            self._put(None)
        # The consumer raises every exception of the thread.
        except BaseException as error:
            self._put(error)

    def _put(self, item: list[Any] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


# Samples for display: text with trained and masked tokens marked and the end token visible.

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Consecutive tokens of one kind.

    Attributes:
        text: the text of the tokens.
        trained: whether the tokens count in the loss.
        special: whether they are special tokens, such as the ends of documents and turns.
        weight: weight of trained tokens in the loss. If it is negative, the model learns to avoid them.
        begins: whether the segment begins another document.
    """

    text: str
    trained: bool
    special: bool
    weight: float = 1.0
    begins: bool = False


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample for display. Padding tokens are counted but not displayed."""

    segments: tuple[TextSegment, ...]
    num_trained: int
    num_masked: int
    num_padding: int
    num_documents: int


def view_sample(sample: Sample, tokenizer: Tokenizer) -> SampleView:
    """Return a sample for display: its text in trained and masked segments, and their counts.

    A token counts as trained if it is the label of the token before it.
    """
    size = sample.num_inputs
    labels = sample.labels[:size]
    ids = sample.input_ids[:size].tolist()
    weights = (labels != IGNORED).astype(np.float32) if sample.weights is None else sample.weights[:size]
    shown = [0.0, *weights[:-1].tolist()]
    documents = sample.document_ids[:size].tolist()
    # Add the last label, which is not one of the inputs.
    if labels[-1] != IGNORED:
        ids.append(int(labels[-1]))
        shown.append(float(weights[-1]))
        documents.append(documents[-1])
    num_trained = sum(weight != 0 for weight in shown)
    return SampleView(
        tuple(_segments(ids, shown, documents, tokenizer)), num_trained, len(ids) - num_trained,
        sample.labels.size - size, documents[-1] + 1,
    )  # fmt: skip


def view_answer(ids: Sequence[int], weights: Sequence[float], tokenizer: Tokenizer) -> SampleView:
    """Return one answer of a preference, with its prompt, for display.

    Args:
        ids: tokens of the prompt and the answer.
        weights: weight of each token: 0 in the prompt, negative in a rejected answer.
        tokenizer: the tokenizer of the ids.
    """
    num_trained = sum(weight != 0 for weight in weights)
    segments = tuple(_segments(list(ids), list(weights), [0] * len(ids), tokenizer))
    return SampleView(segments, num_trained, len(ids) - num_trained, 0, 1)


def visible(text: str) -> str:
    """Return a text with control characters as escapes, so that data cannot control the terminal.

    Newlines and tabs are unchanged, and CR LF becomes a newline.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r\n", "\n"))


def marked(view: SampleView) -> str:
    """Return the sample without colours: masked text as [[text]], and text of a weight such as 0.5 as 0.5{text}."""
    parts = []
    for weight, group in groupby(view.segments, key=lambda segment: segment.weight):
        text = "".join(visible(segment.text) for segment in group)
        parts.append(f"[[{text}]]" if not weight else text if weight == 1.0 else f"{weight:g}{{{text}}}")
    return "".join(parts)


def _segments(
    ids: list[int], weights: list[float], documents: list[int], tokenizer: Tokenizer
) -> Iterator[TextSegment]:
    special = [tokenizer.is_special(token) for token in ids]
    groups = [
        (*key, [entry[0] for entry in group])
        for key, group in groupby(zip(ids, weights, special, documents, strict=True), key=lambda entry: entry[1:])
    ]
    previous = documents[0] if documents else 0
    for document, own in groupby(groups, key=lambda group: group[2]):
        parts = list(own)
        texts = tokenizer.decode_parts([part for *_, part in parts])
        for (weight, is_special, _, _), text in zip(parts, texts, strict=True):
            yield TextSegment(text, weight != 0, is_special, weight, document != previous)
            previous = document
