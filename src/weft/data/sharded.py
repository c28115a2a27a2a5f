"""A user's own DataLoader, cut for data parallel: each rank reads its slice of every global batch, and can resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from weft.errors import DataError


class ShardedLoader:
    """This rank's part of a DataLoader whose `batch_size` is the global batch.

    The order is a function of (seed, epoch): the same global batches at any number of ranks. One pass of `for` is
    one epoch, or what is left of it after `load_state_dict`. State is two integers.
    """

    def __init__(self, loader: DataLoader[Any], dp_rank: int, dp_size: int, seed: int = 0):
        shuffle, batch_size = _order(loader), loader.batch_size
        num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        if batch_size is None or batch_size % dp_size:
            raise DataError(
                f"batch_size={batch_size}: the loader's batch is the global batch, and it is not a multiple of the "
                f"{dp_size} data-parallel ranks. Use a multiple of {dp_size}."
            )
        rest = num_samples % batch_size
        if not loader.drop_last and 0 < rest < dp_size:
            raise DataError(
                f"drop_last=False: the last batch has {rest} of {num_samples} samples, fewer than the {dp_size} "
                f"data-parallel ranks. Use drop_last=True."
            )
        self._slices = _Slices(num_samples, batch_size, loader.drop_last, shuffle, dp_rank, dp_size, seed)
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._slices,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            # Counted before it is handed out: a state saved while the batch is in use comes after it.
            self._slices.next_batch += 1
            yield batch
        self._slices.epoch += 1
        self._slices.next_batch = 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._slices.num_batches

    def state_dict(self) -> dict[str, int]:
        """Epoch, and the next batch in it."""
        return {"epoch": self._slices.epoch, "next_batch": self._slices.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken; nothing is read to get there."""
        self._slices.epoch, self._slices.next_batch = int(state["epoch"]), int(state["next_batch"])


class _Slices(Sampler[list[int]]):
    """Dataset indices of this rank's slice of each global batch."""

    def __init__(
        self, num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, dp_rank: int, dp_size: int, seed: int
    ):
        self._num_samples, self._batch_size = num_samples, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.num_batches = num_samples // batch_size if drop_last else -(-num_samples // batch_size)
        self.epoch = 0
        self.next_batch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed << 32) + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        for batch in range(self.next_batch, self.num_batches):
            whole = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield whole.tensor_split(self._dp_size)[self._dp_rank].tolist()

    def __len__(self) -> int:
        return self.num_batches - self.next_batch


def _order(loader: DataLoader[Any]) -> bool:
    """Whether the loader shuffles; DataError when its order cannot be cut without reading it."""
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "loader.dataset: an IterableDataset has no indices that ranks could share out. "
            "Use a map-style dataset, or give each rank its own stream and call the step with it."
        )
    if isinstance(loader.sampler, RandomSampler):
        return True
    if isinstance(loader.sampler, SequentialSampler):
        return False
    raise DataError(
        f"loader.sampler={type(loader.sampler).__name__}: only shuffle=True and shuffle=False can be cut for ranks. "
        f"Leave the sampler out: run.shard() does what a distributed sampler would."
    )
