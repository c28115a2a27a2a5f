"""The global batches of a user's DataLoader, epoch by epoch: a function of (seed, epoch), so all ranks know them alike.

torch's own shuffle and order are computed. Any other sampler is asked, with random numbers seeded alike on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from weft.data.batch import kept_generators, seed_generators
from weft.errors import DataError

#: Samplers within samplers are looked for under these names.
_INNER = ("sampler", "batch_sampler", "base_sampler")


class BatchIndices(Protocol):
    """Dataset indices of global batches."""

    def count(self, epoch: int) -> int:
        """Batches in an epoch."""
        ...

    def of(self, epoch: int) -> Sequence[Sequence[Any]]:
        """The batches of an epoch."""
        ...

    def check(self, epoch: int, dp_size: int) -> None:
        """Raise DataError where a batch of the epoch leaves one of so many ranks without a sample."""
        ...


def batches_of(loader: DataLoader[Any], seed: int) -> BatchIndices:
    """The loader's global batches. Raises DataError where ranks could not agree on them."""
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "loader.dataset: an IterableDataset has no indices that Weft could divide among ranks. Use a map-style "
            "dataset, or give each rank its own stream and call the step with it."
        )
    if loader.batch_sampler is None:
        raise DataError(
            "batch_size=None: the loader makes no batches, which Weft divides among ranks. Give batch_size, the "
            "samples of the global batch, or a batch_sampler that lists their indices."
        )
    if loader.batch_size is None:
        return _Drawn("batch_sampler", loader.batch_sampler, None, False, seed)
    sampler, batch_size = loader.sampler, loader.batch_size
    # The sampler says how many: it may be of fewer than the dataset has, and a dataset need not know its length.
    if type(sampler) is SequentialSampler:
        return _Computed(len(sampler), batch_size, loader.drop_last, None)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _Computed(len(sampler), batch_size, loader.drop_last, seed)
    return _Drawn("sampler", sampler, batch_size, loader.drop_last, seed)


class _Cut(Sequence[Any]):
    """A row of indices as batches of `batch_size`, the last one shorter."""

    def __init__(self, row: Any, batch_size: int, drop_last: bool):
        self._row, self._batch_size = row, batch_size
        self._count = len(row) // batch_size if drop_last else -(-len(row) // batch_size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._row[index * self._batch_size : (index + 1) * self._batch_size]


class _Computed:
    """torch's shuffle=True and shuffle=False. seed: None for the order of the dataset."""

    def __init__(self, num_samples: int, batch_size: int, drop_last: bool, seed: int | None):
        self._num_samples, self._batch_size, self._drop_last, self._seed = num_samples, batch_size, drop_last, seed

    def count(self, epoch: int) -> int:
        return len(_Cut(range(self._num_samples), self._batch_size, self._drop_last))

    def of(self, epoch: int) -> Sequence[Sequence[int]]:
        if self._seed is None:
            return _Cut(range(self._num_samples), self._batch_size, self._drop_last)
        generator = torch.Generator().manual_seed(_epoch_seed(self._seed, epoch))
        order = torch.randperm(self._num_samples, generator=generator)
        return _Cut(order, self._batch_size, self._drop_last)

    def check(self, epoch: int, dp_size: int) -> None:
        _check_last(self._num_samples, self._batch_size, self._drop_last, dp_size)


class _Drawn:
    """What a sampler of the user's gives, drawn anew for each epoch. batch_size: None where it gives whole batches."""

    def __init__(self, field: str, sampler: Any, batch_size: int | None, drop_last: bool, seed: int):
        self._name = f"{field}={type(sampler).__name__}"
        self._sampler, self._batch_size, self._drop_last, self._seed = sampler, batch_size, drop_last, seed
        if any(isinstance(one, DistributedSampler) for one in _all_of(sampler)):
            raise DataError(
                f"{self._name}: run.shard() does what a DistributedSampler would, so the ranks would be cut twice. "
                f"Leave the sampler out, and use shuffle=True for a random order."
            )
        first = self._draw(0)
        if first != self._draw(0):
            raise DataError(
                f"{self._name}: with equal seeds it gave other indices the second time, so ranks would disagree on a "
                f"batch, and a resumed run could not continue. Let it draw from torch's, numpy's or Python's global "
                f"generator, or from one that set_epoch(epoch) seeds."
            )
        self._epoch, self._drawn = 0, first

    def count(self, epoch: int) -> int:
        return len(self.of(epoch))

    def of(self, epoch: int) -> Sequence[Sequence[Any]]:
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        drawn = self._drawn
        return drawn if self._batch_size is None else _Cut(drawn, self._batch_size, self._drop_last)

    def check(self, epoch: int, dp_size: int) -> None:
        batches = self.of(epoch)
        if self._batch_size is not None:
            _check_last(len(self._drawn), self._batch_size, self._drop_last, dp_size)
        elif batches and (least := min(map(len, batches))) < dp_size:
            raise DataError(
                f"{self._name}: a batch has {least} samples, fewer than the {dp_size} data-parallel ranks. "
                f"Let each have at least {dp_size}."
            )

    def _draw(self, epoch: int) -> list[Any]:
        try:
            length = len(self._sampler)
        except (TypeError, NotImplementedError):
            raise DataError(
                f"{self._name}: it has no length, so the end of an epoch is unknown. Give it a method __len__."
            ) from None
        with _seeded(_epoch_seed(self._seed, epoch), self._sampler, epoch):
            drawn = list(islice(iter(self._sampler), length))
        return [list(one) for one in drawn] if self._batch_size is None else drawn


def _check_last(num_samples: int, batch_size: int, drop_last: bool, dp_size: int) -> None:
    if batch_size < dp_size:
        raise DataError(
            f"batch_size={batch_size}: the loader's batch is the global batch, and it is smaller than the {dp_size} "
            f"data-parallel ranks. Use at least {dp_size}."
        )
    rest = num_samples % batch_size
    if not drop_last and 0 < rest < dp_size:
        raise DataError(
            f"drop_last=False: the last batch has {rest} of {num_samples} samples, fewer than the {dp_size} "
            f"data-parallel ranks. Use drop_last=True."
        )


def _epoch_seed(seed: int, epoch: int) -> int:
    return (seed << 32) + epoch


@contextlib.contextmanager
def _seeded(seed: int, sampler: Any, epoch: int) -> Iterator[None]:
    """Seed all generators that the sampler may draw from, and restore the global ones on leaving."""
    for one in _all_of(sampler):
        if isinstance(generator := getattr(one, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)
    with kept_generators():
        seed_generators(seed, devices=False)
        yield


def _all_of(sampler: Any) -> Iterator[Any]:
    """The sampler, and those that it draws from."""
    found = [sampler]
    while found:
        one = found.pop()
        yield one
        found += [inner for name in _INNER if (inner := getattr(one, name, None)) is not None]
