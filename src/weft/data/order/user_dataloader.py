"""Global batches of a user's DataLoader. They are a function of (seed, epoch), so they are equal on all ranks.

The order of torch's samplers is computed. Any other sampler is iterated, with equal generator seeds on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from weft.config import partitioning as shares
from weft.data.batches import versions_of
from weft.data.order.next_batches import with_next
from weft.data.order.seeded_samples import Fetched, SampleKey, SeededSamples, collate_seeded
from weft.data.order.stream import rows_of
from weft.data.random_state import preserve_generators, seed_generators
from weft.errors import DataError

#: Attributes of a sampler that may be an inner sampler.
_INNER = ("sampler", "batch_sampler", "base_sampler")


class BatchIndices(Protocol):
    """Dataset indices of global batches."""

    def count(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        ...

    def of(self, epoch: int) -> Sequence[Sequence[Any]]:
        """Return the batches of an epoch."""
        ...

    def check(self, epoch: int, dp_size: int) -> None:
        """Raise DataError if a batch of the epoch has fewer than `dp_size` samples."""


def batches_of(loader: DataLoader[Any], seed: int) -> BatchIndices:
    """Return the loader's global batches.

    Raises:
        DataError: if the batches could differ between ranks, the loader has an IterableDataset, a DistributedSampler or
            batch_size=None, or its sampler has no length.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "loader.dataset: an IterableDataset has no indices that Weft could divide among ranks. Use "
            "run.loader(dataset, global_batch=...) instead of run.shard, or a map-style dataset."
        )
    if loader.batch_sampler is None:
        raise DataError(
            "batch_size=None: the loader makes no batches, which Weft divides among ranks. Give batch_size, the "
            "samples of the global batch, or a batch_sampler that lists their indices."
        )
    if loader.batch_size is None:
        return _SampledIndices("batch_sampler", loader.batch_sampler, None, False, seed)
    sampler, batch_size = loader.sampler, loader.batch_size
    # Use the sampler's length: it may sample less than the dataset, and the dataset may have no length.
    if type(sampler) is SequentialSampler:
        return _Computed(len(sampler), batch_size, loader.drop_last, None)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _Computed(len(sampler), batch_size, loader.drop_last, seed)
    return _SampledIndices("sampler", sampler, batch_size, loader.drop_last, seed)


class _BatchSplit(Sequence[Any]):
    """A sequence of indices in batches of `batch_size`. A shorter last batch is dropped if `drop_last`."""

    def __init__(self, row: Any, batch_size: int, drop_last: bool):
        self._row, self._batch_size = row, batch_size
        self._count = len(row) // batch_size if drop_last else -(-len(row) // batch_size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._row[index * self._batch_size : (index + 1) * self._batch_size]


class _Computed:
    """Batches in a random order of the samples for each epoch, or in their stored order if the seed is None."""

    def __init__(self, num_samples: int, batch_size: int, drop_last: bool, seed: int | None):
        self._num_samples, self._batch_size, self._drop_last, self._seed = num_samples, batch_size, drop_last, seed

    def count(self, epoch: int) -> int:
        return len(_BatchSplit(range(self._num_samples), self._batch_size, self._drop_last))

    def of(self, epoch: int) -> Sequence[Sequence[int]]:
        if self._seed is None:
            return _BatchSplit(range(self._num_samples), self._batch_size, self._drop_last)
        generator = torch.Generator().manual_seed(_epoch_seed(self._seed, epoch))
        order = torch.randperm(self._num_samples, generator=generator)
        return _BatchSplit(order, self._batch_size, self._drop_last)

    def check(self, epoch: int, dp_size: int) -> None:
        _check_last(self._num_samples, self._batch_size, self._drop_last, dp_size)


class _SampledIndices:
    """Batches of a user's sampler, which is iterated for each epoch. `batch_size` is None for a batch sampler.

    Raises DataError if the sampler has no length, gives other indices with equal seeds, or is a DistributedSampler.
    """

    def __init__(self, field: str, sampler: Any, batch_size: int | None, drop_last: bool, seed: int):
        self._name = f"{field}={type(sampler).__name__}"
        self._sampler, self._batch_size, self._drop_last, self._seed = sampler, batch_size, drop_last, seed
        if any(isinstance(one, DistributedSampler) for one in _all_of(sampler)):
            raise DataError(
                f"{self._name}: run.shard() replaces a DistributedSampler, so data would be sharded twice. Leave the "
                "sampler out, and use shuffle=True for a random order."
            )
        first = self._draw(0)
        if first != self._draw(0):
            raise DataError(
                f"{self._name}: with equal seeds it gave other indices the second time, so ranks would disagree on a "
                f"batch, and a resumed run could not continue. Let it draw from torch's, numpy's or Python's global "
                f"generator, or from one that set_epoch(epoch) seeds."
            )
        self._epoch, self._indices = 0, first

    def count(self, epoch: int) -> int:
        return len(self.of(epoch))

    def of(self, epoch: int) -> Sequence[Sequence[Any]]:
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._draw(epoch)
        drawn = self._indices
        return drawn if self._batch_size is None else _BatchSplit(drawn, self._batch_size, self._drop_last)

    def check(self, epoch: int, dp_size: int) -> None:
        batches = self.of(epoch)
        if self._batch_size is not None:
            _check_last(len(self._indices), self._batch_size, self._drop_last, dp_size)
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
    """Seed all generators that the sampler may use, call its `set_epoch`, and restore the global generators at exit."""
    for one in _all_of(sampler):
        if isinstance(generator := getattr(one, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)
    with preserve_generators():
        seed_generators(seed, devices=False)
        yield


def _all_of(sampler: Any) -> Iterator[Any]:
    found = [sampler]
    while found:
        one = found.pop()
        yield one
        found += [inner for name in _INNER if (inner := getattr(one, name, None)) is not None]


# A resumable wrapper of a user's DataLoader for data parallelism: each rank reads its slice of every global batch.


class AsBatch(Protocol):
    """Function that turns a rank's microbatches into the value that the loop yields."""

    def __call__(
        self, batches: list[Any], numbers: Sequence[Sequence[int]], rows: list[Any], *, is_plain: bool, total: int
    ) -> Any:
        """Return the value for one global batch.

        Args:
            batches: the rank's microbatches.
            numbers: indices in the global batch of each microbatch's samples. Empty for a dummy microbatch, which a
                rank without enough samples gets.
            rows: number of rows of each sample, as `rows_of` returns them.
            is_plain: whether the rank's samples are in one batch and every rank has samples.
            total: number of samples of the global batch.
        """
        ...


class ShardedLoader:
    """One rank's part of a DataLoader whose `batch_size` is the global batch.

    The order is a function of (seed, epoch), so the global batches are equal for any number of ranks. A user's sampler
    or batch_sampler is iterated with generators seeded from (seed, epoch), equal on all ranks. The sample counts of
    ranks follow `weights`; without them, they differ by at most one. One `for` loop is one epoch, or the rest of it
    after `load_state_dict`. The state is two integers.

    Args:
        loader: the user's loader. Its collate_fn, workers and memory options are kept.
        dp_rank: this rank's position on the data-parallel axes.
        dp_size: number of ranks on them.
        seed: seed of the order.
        num_microbatches: number of microbatches of a rank's samples.
        as_batch: makes the value that `for` yields. If None, `for` yields the plain batch, and `num_microbatches` must
            be 1.
        takes_empty: called at the start of an epoch, returns whether batches may have fewer samples than ranks. If
            None, they may not, and the constructor checks it.
        seed_samples: seed the global generators for each sample and each call to the collate function.
        weights: the plan's shares, one per data rank; () for equal parts.

    Raises:
        DataError: if the global batches could differ between ranks, or, also during iteration, a batch has too few
            samples.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dp_rank: int,
        dp_size: int,
        seed: int = 0,
        *,
        num_microbatches: int = 1,
        as_batch: AsBatch | None = None,
        takes_empty: Callable[[], bool] | None = None,
        seed_samples: bool = True,
        weights: Sequence[int] = (),
    ):
        self._as_batch, self._num_microbatches = as_batch, num_microbatches
        self._slices = _Slices(
            batches_of(loader, seed), dp_rank, dp_size, num_microbatches, takes_empty or (lambda: False), seed_samples,
            tuple(weights),
        )  # fmt: skip
        if takes_empty is None:
            self._slices.check()
        self._loader: DataLoader[Any] = DataLoader(
            SeededSamples(loader.dataset, seed) if seed_samples else loader.dataset,
            batch_sampler=self._slices,
            num_workers=loader.num_workers,
            collate_fn=CollateParts(loader.collate_fn, num_microbatches, counts_rows=as_batch is not None),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        return self._counted(self._batches())

    def with_next(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch with the next one, or None at the end of the epoch, for `step(batch, next_batch=...)`.

        `state_dict` counts the first of the two.
        """
        return self._counted(with_next(self._batches(), versions_of))

    def _batches(self) -> Iterator[Any]:
        for number, (parts, rows) in enumerate(self._loader, self._slices.next_batch):
            yield self._batch(parts, rows, self._slices.size_of(number))

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        slices = self._slices
        for item in items:
            # Count before the yield, so that a state saved while the batch is in use points to the next batch.
            slices.next_batch += 1
            yield item
        slices.epoch += 1
        slices.next_batch = 0

    def __len__(self) -> int:
        return self._slices.num_batches

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the next batch in it."""
        return {"epoch": self._slices.epoch, "next_batch": self._slices.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state_dict`. No data is read to reach it."""
        self._slices.epoch, self._slices.next_batch = int(state["epoch"]), int(state["next_batch"])

    def _batch(self, parts: list[Any], rows: list[Any], global_batch: int) -> Any:
        if self._as_batch is None:
            return parts[0]
        slices, num_parts = self._slices, self._num_microbatches
        everyone_has_some = slices.feeds_all(global_batch)
        numbers: Sequence[Sequence[int]] = slices.numbers_of(global_batch)
        if len(parts) < num_parts:  # all samples were collated together; the step splits them along dim 0
            if not everyone_has_some:
                raise DataError(
                    f"loader: a batch has {global_batch} samples, fewer than the {slices.dp_size} data-parallel ranks, "
                    f"and the dataset's __getitems__ gives no list of samples. Let it give one, or use drop_last=True."
                )
            return self._as_batch(parts, [[*chain(*numbers)]], rows, is_plain=True, total=global_batch)
        # Equal on all ranks: a rank with samples must take the same path as a rank without.
        is_plain = num_parts == 1 and everyone_has_some
        return self._as_batch(parts, numbers, rows, is_plain=is_plain, total=global_batch)


class CollateParts:
    """Calls the user's collate function for each microbatch of the samples, in the loader's workers.

    It returns the microbatches, and the row counts of their samples. Samples are divided evenly, and the first
    microbatches may have one more, as in `microbatch_samples`. A microbatch without samples gets the rank's first
    sample as a dummy. If the samples are not a list, as from a dataset's __getitems__, they are collated together.
    """

    def __init__(self, collate: Callable[[Any], Any], num_parts: int, *, counts_rows: bool):
        self._collate, self._num_parts, self._counts_rows = collate, num_parts, counts_rows

    def __call__(self, fetched: Any) -> tuple[list[Any], list[Any]]:
        samples, seeds = (fetched.samples, fetched.seeds) if isinstance(fetched, Fetched) else (fetched, ())
        if not isinstance(samples, list | tuple):
            return [self._collated(samples, seeds)], [()]
        if self._num_parts == 1:
            parts = [(samples, seeds)]
        else:
            cuts = shares.share_out(len(samples), self._num_parts)
            parts = [(samples[cut.start : cut.stop] or samples[:1], seeds[cut.start :] or seeds[:1]) for cut in cuts]
        rows = [rows_of(part) if self._counts_rows else () for part, _ in parts]
        return [self._collated(*part) for part in parts], rows

    def _collated(self, samples: Any, seeds: Sequence[int]) -> Any:
        return collate_seeded(self._collate, samples, seeds[0]) if seeds else self._collate(samples)


class _Slices(Sampler[list[Any]]):
    """Dataset indices of this rank's part of each global batch.

    A rank without samples gets the first index of the batch.
    """

    def __init__(
        self, batches: BatchIndices, dp_rank: int, dp_size: int, num_microbatches: int, takes_empty: Callable[[], bool],
        gives_places: bool, weights: tuple[int, ...] = (),
    ):  # fmt: skip
        self._gives_places, self._weights = gives_places, weights
        self._batches, self._takes_empty, self._num_microbatches = batches, takes_empty, num_microbatches
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.epoch = 0
        self.next_batch = 0
        self._reading: Sequence[Sequence[Any]] = ()

    @property
    def num_batches(self) -> int:
        """Number of batches in this epoch."""
        return self._batches.count(self.epoch)

    def check(self) -> None:
        """Raise DataError if a batch of the epoch leaves a rank without samples and `takes_empty` does not allow it."""
        if self._takes_empty():
            return
        if not self._weights:
            self._batches.check(self.epoch, self.dp_size)
            return
        least = -(-sum(self._weights) // min(self._weights))
        try:
            self._batches.check(self.epoch, least)
        except DataError:
            written = "+".join(map(str, self._weights))
            raise DataError(
                f"shares={written}: a batch has fewer than {least} samples, so a rank may get none. Use batches of at "
                f"least {least}, with drop_last=True, or more even shares."
            ) from None

    def feeds_all(self, global_batch: int) -> bool:
        """Return True if every rank has a sample of a global batch of this size."""
        if self._weights:
            return min(shares.largest_remainder(global_batch, self._weights)) > 0
        return global_batch >= self.dp_size

    def size_of(self, number: int) -> int:
        """Return the number of samples in a global batch of the current epoch."""
        return len(self._reading[number])

    def __iter__(self) -> Iterator[list[Any]]:
        self.check()
        batches = self._reading = self._batches.of(self.epoch)
        for number in range(self.next_batch, len(batches)):
            own = self._own(batches[number])
            if self._gives_places:
                positions = [*chain(*self.numbers_of(len(batches[number])))] or [0]
                own = [SampleKey(self.epoch, number, *one) for one in zip(positions, own, strict=True)]
            yield own

    def __len__(self) -> int:
        return self.num_batches - self.next_batch

    def numbers_of(self, global_batch: int) -> list[range]:
        """Return the indices in a global batch of this rank's samples, by microbatch."""
        return shares.microbatch_samples(
            global_batch, self.dp_size, self._num_microbatches, self.dp_rank, self._weights
        )

    def _own(self, batch: Any) -> list[Any]:
        own = self.numbers_of(len(batch))
        runs = [batch[part.start : part.stop] for part in own] if own[0] else [batch[:1]]
        return [*chain(*(run.tolist() if isinstance(run, torch.Tensor) else run for run in runs))]
