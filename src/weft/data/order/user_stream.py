"""Global batches of a user's stream, which has no indices. They do not depend on the number of ranks and workers.

A stream with shards is divided into parts: as many as the largest divisor of the global batch for which they have
almost equal numbers of shards. Each part gives the same number of consecutive samples of every global batch, so its
position is a function of the step. A rank, and each of its workers, reads only the parts that it has samples in.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from weft.config import partitioning as shares
from weft.data.batches import versions_of
from weft.data.order.next_batches import with_next
from weft.data.order.stream import count_parts
from weft.data.order.user_dataloader import AsBatch, CollateParts
from weft.errors import DataError, WeftWarning


class StreamLoader:
    """One rank's part of a stream. One `for` loop is one epoch, or the rest of it after `load_state_dict`.

    At the end of an epoch, samples of an incomplete global batch are dropped with a `WeftWarning`.

    Args:
        source: an iterable that starts again at each `iter`, with equal samples on all ranks. If it has `num_shards`
            and `shard(num_shards, index)`, like `datasets.IterableDataset`, ranks read different shards. Optional
            methods: `set_epoch(epoch)`, and `skip(num_samples)`, for faster resuming.
        global_batch: samples of a batch over all ranks.
        dp_rank, dp_size: this rank's position on the data-parallel axes, and the number of ranks on them.
        collate_fn: makes a batch of a list of samples.
        num_workers: processes that read parts; at most one for each part of this rank.
        repeat: start a part again when it ends, so that an epoch has no end.
        num_microbatches: number of microbatches of a rank's samples.
        as_batch: makes the value that `for` yields.
        total: returns the sum of a number over the data-parallel ranks.
        weights: the plan's shares, one per data rank; () for equal parts.

    Raises:
        DataError: if the source cannot be read again, or is divided among ranks already, or `global_batch` is smaller
            than `dp_size`.
    """

    def __init__(
        self,
        source: Iterable[Any],
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        repeat: bool,
        num_microbatches: int,
        as_batch: AsBatch,
        total: Callable[[int], int],
        weights: Sequence[int] = (),
    ):
        _check(source, global_batch, dp_size)
        self._collate = CollateParts(collate_fn or default_collate, num_microbatches, counts_rows=True)
        self._as_batch, self._total, self._num_workers = as_batch, total, num_workers
        self._global_batch, self._dp_rank, self._dp_size = global_batch, dp_rank, dp_size
        most = getattr(source, "num_shards", 1) if callable(getattr(source, "shard", None)) else 1
        num_parts = count_parts(most, global_batch)
        self._numbers = shares.microbatch_samples(global_batch, dp_size, num_microbatches, dp_rank, weights)
        size = global_batch // num_parts
        own: dict[int, list[int]] = {}
        for number in chain(*self._numbers):
            own.setdefault(number // size, []).append(number % size)
        self._parts = _Parts(source, num_parts, size, own, repeat)
        self.epoch, self.next_batch = 0, 0

    def __iter__(self) -> Iterator[Any]:
        return self._counted(self._batches())

    def with_next(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch with the next one, or None at the end of the epoch, for `step(batch, next_batch=...)`.

        `state_dict` counts the first of the two.
        """
        return self._counted(with_next(self._batches(), versions_of))

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            # Count before the yield, so that a state saved while the batch is in use points to the next batch.
            self.next_batch += 1
            yield item
        self.epoch, self.next_batch = self.epoch + 1, 0

    def _batches(self) -> Iterator[Any]:
        parts, num_batches = self._parts, self.next_batch
        parts.epoch, parts.start = self.epoch, self.next_batch
        num_workers = min(self._num_workers, len(parts.own))
        batches = iter(DataLoader(parts, batch_size=None, num_workers=num_workers, collate_fn=_unchanged))
        while True:
            # Workers take turns, in the order of their parts.
            pieces = list(islice(batches, max(1, num_workers)))
            ended = any(isinstance(piece, _End) for piece in pieces)
            # A source that is not divided ends on all ranks after the same sample.
            if self._total(ended) if parts.num_parts > 1 and not parts.repeat else ended:
                break
            num_batches += 1
            yield self._batch([*chain(*pieces)])
        num_left = self._total(sum(piece.num_samples if isinstance(piece, _End) else len(piece) for piece in pieces))
        if num_left and self._dp_rank == 0:
            warnings.warn(
                f"loader: the stream ends after {num_batches} global batches. The next one has only {num_left} of "
                f"{self._global_batch} samples, because some part has no more, and what is left is not used. Pass "
                "repeat=True to start such parts again.",
                WeftWarning,
                stacklevel=2,
            )

    def _batch(self, samples: list[Any]) -> Any:
        batches, rows = self._collate(samples)
        is_plain = len(self._numbers) == 1
        return self._as_batch(batches, self._numbers, rows, is_plain=is_plain, total=self._global_batch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the next batch in it, and the sizes that determine the order of samples."""
        return {
            "epoch": self.epoch,
            "next_batch": self.next_batch,
            "global_batch": self._global_batch,
            "parts": self._parts.num_parts,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state_dict`.

        Each part is read up to that position, unless the source has `skip` and `repeat` is False.

        Raises:
            DataError: if the samples would come in another order.
        """
        for key, own in {"global_batch": self._global_batch, "parts": self._parts.num_parts}.items():
            if state.get(key, own) != own:
                raise DataError(
                    f"{key}={own}: the stream's state was saved with {state[key]}, and its samples would come in "
                    "another order. Use the same global batch and shards."
                )
        self.epoch, self.next_batch = int(state["epoch"]), int(state["next_batch"])


def _check(source: Any, global_batch: int, dp_size: int) -> None:
    if isinstance(source, DataLoader):
        raise DataError("loader: it is a DataLoader. Pass its dataset, and global_batch instead of batch_size.")
    if isinstance(source, Iterator) or not isinstance(source, Iterable):
        raise DataError(
            f"loader: a {type(source).__name__} cannot be read a second time, which resuming and epochs need. Pass an "
            "object whose __iter__ starts again, such as an IterableDataset."
        )
    if getattr(source, "_distributed", None) is not None:
        raise DataError("loader: split_dataset_by_node has divided it among ranks already. Pass the full data set.")
    if global_batch < dp_size:
        raise DataError(
            f"global_batch={global_batch}: fewer samples than the {dp_size} data-parallel ranks. Use {dp_size} or more."
        )


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a part. `num_samples` samples of the rank have been read for a batch that stays incomplete."""

    num_samples: int


def _unchanged(samples: Any) -> Any:
    return samples


class _Parts(IterableDataset[Any]):
    """The samples of a rank in each global batch, as a list; then an `_End`. Each worker reads some of the parts.

    size: samples of one part in each global batch. own: for each part, the indices of the rank's samples among these.
    """

    def __init__(self, source: Any, num_parts: int, size: int, own: dict[int, list[int]], repeat: bool):
        self.source, self.num_parts, self.size, self.own, self.repeat = source, num_parts, size, own, repeat
        self.epoch, self.start = 0, 0

    def __iter__(self) -> Iterator[list[Any] | _End]:
        mine = list(self.own)
        if (worker := get_worker_info()) is not None:
            mine = [mine[index] for index in shares.share_out(len(mine), worker.num_workers)[worker.id]]
            # The source must not divide its samples among the workers as well.
            object.__setattr__(worker, "id", 0)
            object.__setattr__(worker, "num_workers", 1)
        readers = {part: self._samples(part) for part in mine}
        while True:
            chunks = {part: list(islice(reader, self.size)) for part, reader in readers.items()}
            taken = [chunks[part][index] for part in mine for index in self.own[part] if index < len(chunks[part])]
            if any(len(chunk) < self.size for chunk in chunks.values()):
                yield _End(len(taken))
                return
            yield taken

    @staticmethod
    def _set_epoch(source: Any, epoch: int) -> Any:
        """Set the epoch of a source, and return it. A source that `shard` or `skip` returned begins at epoch 0."""
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(epoch)
        return source

    def _samples(self, part: int) -> Iterator[Any]:
        """Yield the samples of a part from its position on: without an end if `repeat` is True.

        Raises DataError if such a part has no sample.
        """
        left = self.start * self.size
        for epoch in itertools.count(self.epoch):
            source = self._set_epoch(self.source, epoch)
            if self.num_parts > 1:
                source = self._set_epoch(source.shard(num_shards=self.num_parts, index=part), epoch)
            if not self.repeat:
                has_skip = left and callable(getattr(source, "skip", None))
                yield from self._set_epoch(source.skip(left), epoch) if has_skip else islice(source, left, None)
                return
            num_samples = 0
            for sample in source:
                num_samples += 1
                if num_samples > left:
                    yield sample
            left = max(0, left - num_samples)
            if not num_samples:
                raise DataError(f"loader: part {part} of {self.num_parts} has no sample. Pass a source with data.")
