"""Batches of indexed samples, in the order of each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from weft.data.batches import map_tensors
from weft.data.order.loader import Prefetch
from weft.data.order.stream import permutation
from weft.errors import DataError
from weft.train.batches.batching_by_cost import Costs, StepBorders
from weft.train.batches.data_share import MapDataset, Share
from weft.train.batches.microbatches import Microbatches

if TYPE_CHECKING:
    from torch import nn


Model = TypeVar("Model", bound="nn.Module")

Collate = Callable[[list[Any]], Any]


class IndexedBatches:
    """The microbatches of one rank.

    The order of training is an endless sequence of epochs, each a permutation of all samples. Step s reads the
    positions in `places`, by default s * global_batch + [0, global_batch). They are divided among ranks and
    microbatches by number (`microbatch_samples`) or, with `costs`, by cost. `iterate` reads samples in a thread, two
    steps ahead.

    Raises:
        DataError: if there are no samples.
    """

    def __init__(
        self,
        samples: MapDataset,
        share: Share,
        collate: Collate,
        *,
        seed: int,
        costs: Costs | None = None,
        places: StepBorders | None = None,
    ):
        if not len(samples):
            raise DataError("task: it has no training samples. Let samples('train') return some.")
        self._samples, self._share, self._collate, self._seed = samples, share, collate, seed
        self._costs = costs
        self.places: StepBorders = places or StepBorders.of(None, share.global_batch)
        self._divided: dict[tuple[int, tuple[int, ...]], Sequence[Sequence[int]]] = {}

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def batches(self, step: int) -> list[Any]:
        """Return the microbatches of a step."""
        return self._build_batch(step, None)

    def batches_ahead(self, step: int) -> list[Any]:
        """Return the microbatches of a step, like `batches`.

        A dataset with a method `many` is read in one call, which also gets the indices of the next step's samples.
        """
        if not hasattr(self._samples, "many"):
            return self._build_batch(step, None)
        own, coming = ([number for part in self._own(one) for number in part] for one in (step, step + 1))
        first, second = self.places.first(step), self.places.first(step + 1)
        place = {number: self.locate(first + number) for number in own}
        soon = [self.locate(second + number) for number in coming]
        return self._build_batch(step, _reader(self._samples, place, soon))

    def _build_batch(self, step: int, read: Callable[[int], Any] | None) -> list[Any]:
        first, own = self.places.first(step), self._own(step)
        total = self.places.first(step + 1) - first
        return _microbatches(read or self._located(first, own), own, total, self._share, self._collate)

    def _located(self, first: int, own: Sequence[Sequence[int]]) -> Callable[[int], Any]:
        """Return a function from index in the batch to sample, for the indices `own` of a batch that begins at `first`.

        The order of all samples is computed together, which is faster than one by one.
        """
        numbers = np.array([number for part in own for number in part], np.int64)
        epochs, rests = np.divmod(first + numbers, len(self._samples))
        indices = np.empty_like(rests)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            order = permutation(len(self._samples), "task", self._seed, epoch)
            indices[of_epoch] = order.take(rests[of_epoch])
        place = dict(zip(numbers.tolist(), zip(epochs.tolist(), indices.tolist(), strict=True), strict=True))
        return lambda number: self._read(*(place.get(number) or self.locate(first + number)))

    def _own(self, step: int) -> Sequence[Sequence[int]]:
        share = self._share
        if self._costs is None:
            return share.own(step)
        weights = share.timeline.at(step)
        found = self._divided.get((step, weights))
        if found is None:
            indices = [self.locate(place)[1] for place in range(self.places.first(step), self.places.first(step + 1))]
            found = self._costs.divide(indices, share.size, weights)[share.rank]
            # Keep recent results, because the read-ahead asks for each step twice.
            self._divided = {key: own for key, own in self._divided.items() if key[0] == step - 1}
            self._divided[step, weights] = found
        return found

    def iterate(self, start_step: int, end_step: int) -> Prefetch:
        """Return the microbatches of some steps, which a thread builds ahead."""
        return _Ahead(self, start_step, end_step)

    def close(self) -> None:
        """Close the dataset, if it has the methods `many` and `close`."""
        _close(self._samples)

    def state_at(self, num_samples: int) -> dict[str, int]:
        """Return the epoch and the position in it after `num_samples` samples."""
        epoch, index = divmod(num_samples, len(self._samples))
        return {"epoch": epoch, "index": index}

    def locate(self, place: int) -> tuple[int, int]:
        """Return (epoch, index) of the sample at a position in training order."""
        return sample_index(len(self._samples), self._seed, place)

    def sample(self, place: int) -> Any:
        """Return the sample at a position in training order."""
        return self._read(*self.locate(place))

    def _read(self, epoch: int, index: int) -> Any:
        in_epoch = getattr(self._samples, "in_epoch", None)
        return self._samples[index] if in_epoch is None else in_epoch(epoch, index)


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the indices of all samples in the training order of an epoch, int64 (samples,)."""
    return permutation(num_samples, "task", seed, epoch).take(np.arange(num_samples))


def sample_index(num_samples: int, seed: int, place: int) -> tuple[int, int]:
    """Return (epoch, index) of the sample at a position in training order.

    Args:
        num_samples: samples of one epoch.
        seed: the run's seed.
        place: position in training order.
    """
    epoch, rest = divmod(place, num_samples)
    return epoch, permutation(num_samples, "task", seed, epoch)(rest)


def sample_in_order(samples: MapDataset | None, seed: int, place: int) -> tuple[str, Any]:
    """Return (text, sample) for a position in training order. The text has the sample's epoch and index.

    Args:
        samples: the task's samples.
        seed: the run's seed.
        place: position in training order.
    """
    row = IndexedBatches(samples or (), Share(1), list, seed=seed)
    epoch, index = row.locate(place)
    return f"epoch {epoch}, number {index} of {row.samples_per_epoch}", row.sample(place)


class _EvalBatches:
    def __init__(self, samples: MapDataset, share: Share, collate: Collate, num_batches: int):
        self._samples, self._share, self._collate, self._num_batches = samples, share, collate, num_batches

    def __iter__(self) -> Iterator[Any]:
        size, parts = self._share.global_batch, self._share.own(0)
        own = [number for part in parts for number in part]
        try:
            for start in range(0, self._num_batches * size, size):
                place = {number: (0, start + number) for number in own}
                is_last = start + size == self._num_batches * size
                soon = [] if is_last else [(0, start + size + number) for number in own]
                read = _reader(self._samples, place, soon) or (
                    lambda number, first=start: self._samples[first + number]
                )
                yield from _microbatches(read, parts, size, self._share, self._collate)
        finally:
            _close(self._samples)


def evaluation_batches(samples: MapDataset | None, share: Share, collate: Collate, most: int) -> Iterable[Any] | None:
    """Return this rank's microbatches for an evaluation, or None without samples.

    At most `most` global batches are read, in index order from the first sample, and only full ones. After the last
    batch, the dataset is closed if it has the methods `many` and `close`.

    Raises:
        DataError: if there are fewer samples than one global batch.
    """
    if samples is None or not len(samples):
        return None
    if len(samples) < share.global_batch:
        raise DataError(
            f"task: it has {len(samples)} evaluation samples, and an evaluation reads full batches of "
            f"train.global_batch={share.global_batch}. Return at least that number, or None."
        )
    return _EvalBatches(samples, share, collate, min(most, len(samples) // share.global_batch))


class _Ahead(Prefetch):
    """Batches that are built in a thread. `close` also closes the dataset."""

    def __init__(self, loader: IndexedBatches, start_step: int, end_step: int):
        self._loader = loader
        super().__init__(_AtOnce(loader), start_step, end_step)

    def close(self) -> None:
        super().close()
        self._loader.close()


class _AtOnce:
    """Loader for `Prefetch` whose method `batches` is `IndexedBatches.batches_ahead`."""

    def __init__(self, loader: IndexedBatches):
        self.batches = loader.batches_ahead


def _close(samples: MapDataset) -> None:
    close = getattr(samples, "close", None) if hasattr(samples, "many") else None
    if close is not None:
        close()


def _reader(samples: MapDataset, place: dict[int, Any], soon: list[Any]) -> Callable[[int], Any] | None:
    """Read samples with one call of `samples.many`, and return a function from index in the batch to sample.

    Return None if `samples` has no method `many`, or if there is nothing to read.

    place: (epoch, index) by index in the batch. soon: (epoch, index) of the samples that are needed next.
    """
    many = getattr(samples, "many", None)
    if many is None or not place:
        return None
    found = dict(zip(place, many(list(place.values()), soon), strict=True))
    return found.__getitem__


def _microbatches(
    sample_at: Callable[[int], Any], own: Sequence[Sequence[int]], total: int, share: Share, collate: Collate
) -> list[Any]:
    """Return the rank's microbatches of a global batch of `total` samples, with their sample indices attached.

    sample_at: returns a sample by its index in the global batch. own: the indices of each microbatch's samples.
    """
    cut = Microbatches.of_samples(sample_at, own, collate, total)
    return (cut.map(_pinned) if share.pin else cut).marked()


def _pinned(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.pin_memory(), batch)
