"""Batches of a trainer's DataLoader for each rank: batch k is for data rank k modulo the number of data ranks.

So the data ranks together read the samples of a loader on one device whose batch is that many times larger. Ranks of
tp, cp and pp read the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from weft.comm.mesh import Axis
from weft.errors import DataError

#: Options that a DataLoader keeps as attributes.
_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class RankBatches:
    """The batches of one data rank from a batch sampler, which draws the same batches on all ranks.

    Of each `num_processes` consecutive batches, the rank gets the one at its index.

    Args:
        batches: the batch sampler of one device.
        rank: index of the data rank.
        num_processes: number of data ranks, under the name that accelerate reads.
        fills: if the last group has no batch for this rank, yield the group's first batch, so that all ranks get the
            same number. Otherwise some ranks get one batch less.
        drop_last: drop the last group if it is incomplete.
    """

    def __init__(self, batches: Any, rank: int, num_processes: int, *, fills: bool, drop_last: bool):
        self._batches, self._rank, self.num_processes = batches, rank, num_processes
        self._fills, self.drop_last = fills, drop_last

    def __len__(self) -> int:
        count = len(self._batches)
        return count // self.num_processes if self.drop_last else -(-count // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        every = iter(self._batches)
        while batches := list(islice(every, self.num_processes)):
            if self.drop_last and len(batches) < self.num_processes:
                return
            if self._rank < len(batches):
                yield batches[self._rank]
            elif self._fills:
                yield batches[0]

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank."""
        return self._batches.batch_size

    @property
    def sampler(self) -> Any:
        """The batch sampler's sampler. accelerate replaces it with one that is seeded by the epoch."""
        return self._batches.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._batches.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a batch sampler that has one."""
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)


class RankStream(IterableDataset[Any]):
    """One data rank's share of a stream that every rank reads in full.

    Of each group of num_ranks * batch_size consecutive samples, it yields the `batch_size` samples of its rank.

    drop_last: drop an incomplete group at the end.
    """

    def __init__(self, stream: Iterable[Any], batch_size: int, rank: int, num_ranks: int, *, drop_last: bool):
        self._stream, self._batch_size, self._rank = stream, batch_size, rank
        self._num_ranks, self._drop_last = num_ranks, drop_last

    def __iter__(self) -> Iterator[Any]:
        every, first, size = iter(self._stream), self._rank * self._batch_size, self._batch_size * self._num_ranks
        while samples := list(islice(every, size)):
            if self._drop_last and len(samples) < size:
                return
            yield from samples[first : first + self._batch_size]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a stream that has one."""
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)


def rank_loader(loader: DataLoader[Any], data: Axis, device: torch.device, seed: int | None, *, trains: bool) -> Any:
    """Return this rank's part of a trainer's DataLoader, as accelerate's loader.

    Args:
        loader: loader with the batches of one rank.
        data: ranks that read different samples.
        device: device of the batches.
        seed: seed of the order; None for torch's initial seed.
        trains: True for training. In evaluation all ranks get the same number of batches.

    Raises:
        DataError: on several data ranks, for a stream in evaluation, because its length is unknown, or for a loader
            without batches.
    """
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        if data.size > 1 and not trains:
            raise DataError(
                f"eval_dataset of type {type(loader.dataset).__name__}: {data.size} data ranks need the number of its "
                "samples, and a stream has no length. Use a dataset with a length for evaluation."
            )
        if data.size > 1 and loader.batch_size is not None:
            stream = RankStream(loader.dataset, loader.batch_size, data.rank, data.size, drop_last=loader.drop_last)
            loader = DataLoader(stream, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
    elif data.size > 1:
        if loader.batch_sampler is None:
            raise DataError(
                f"batch_size=None: {data.size} data ranks divide batches, and the loader makes none. Give a batch size."
            )
        batches = RankBatches(
            loader.batch_sampler, data.rank, data.size, fills=not trains, drop_last=trains and loader.drop_last
        )
        loader = DataLoader(loader.dataset, batch_sampler=batches, **options)  # pyright: ignore[reportArgumentType] (any iterable serves)
    # Other samplers than torch's draw from torch's generator, which must be equal on all ranks.
    sampler = getattr(loader.batch_sampler, "sampler", None)
    draws = trains and not isinstance(sampler, RandomSampler | SequentialSampler | None)
    syncs = draws and getattr(sampler, "generator", None) is None and data.size > 1
    return prepare_data_loader(
        loader, device, num_processes=1, process_index=0, rng_types=["torch"] if syncs else None, put_on_device=True,
        dispatch_batches=False, use_seedable_sampler=True, data_seed=seed,
    )  # fmt: skip


def rows_in(batch: Any) -> int:
    """Count the samples of a collated batch: dim 0 of its first tensor, or the entries of a list."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 0
    if isinstance(batch, list):
        return len(batch)
    values: Sequence[Any] = list(batch.values()) if hasattr(batch, "values") else list(batch)
    return next((count for value in values if isinstance(value, torch.Tensor | list) and (count := rows_in(value))), 0)
