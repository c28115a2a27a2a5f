"""A user's own DataLoader, cut for data parallel: each rank reads its slice of every global batch, and can resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from weft.data.order.drawn import Batches, batches_of
from weft.errors import DataError


class ShardedLoader:
    """This rank's part of a DataLoader whose `batch_size` is the global batch.

    The order is a function of (seed, epoch): the same global batches at any number of ranks. A sampler or batch_sampler
    of the user's is drawn with random numbers seeded by them, alike on all ranks.
    One pass of `for` is one epoch, or what is left of it after `load_state_dict`. State is two integers.
    """

    def __init__(self, loader: DataLoader[Any], dp_rank: int, dp_size: int, seed: int = 0):
        batch_size = loader.batch_size
        if batch_size is not None and batch_size % dp_size:
            raise DataError(
                f"batch_size={batch_size}: the loader's batch is the global batch, and it is not a multiple of the "
                f"{dp_size} data-parallel ranks. Use a multiple of {dp_size}."
            )
        self._slices = _Slices(batches_of(loader, seed), dp_rank, dp_size)
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._slices,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
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


class _Slices(Sampler[list[Any]]):
    """Dataset indices of this rank's slice of each global batch."""

    def __init__(self, batches: Batches, dp_rank: int, dp_size: int):
        self._batches = batches
        batches.check(0, dp_size)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self.epoch = 0
        self.next_batch = 0

    @property
    def num_batches(self) -> int:
        """In the whole of this epoch."""
        return self._batches.count(self.epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        self._batches.check(self.epoch, self._dp_size)
        batches = self._batches.of(self.epoch)
        for number in range(self.next_batch, len(batches)):
            yield self._own(batches[number])

    def __len__(self) -> int:
        return self.num_batches - self.next_batch

    def _own(self, batch: Any) -> list[Any]:
        size, rest = divmod(len(batch), self._dp_size)
        start = self._dp_rank * size + min(self._dp_rank, rest)
        own = batch[start : start + size + (self._dp_rank < rest)]
        return own.tolist() if isinstance(own, torch.Tensor) else list(own)
