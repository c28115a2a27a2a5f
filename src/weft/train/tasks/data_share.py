"""Which samples of a task a rank reads, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from weft.config import partitioning as shares


@dataclass(frozen=True, slots=True)
class Share:
    """Which samples are this rank's: data-parallel rank `rank` of `size`.

    global_batch: samples of one optimizer step over all ranks. microbatches: into how many a rank's part of them is
    cut. pin: whether tensors are wanted in pinned memory.
    """

    global_batch: int
    microbatches: int = 1
    rank: int = 0
    size: int = 1
    pin: bool = False

    @property
    def rows(self) -> int:
        """Samples of one microbatch on this rank."""
        return shares.samples_per_microbatch(self.global_batch, self.size, self.microbatches)


class MapDataset(Protocol):
    """Samples by index: a list, or a map-style dataset of torch.

    Training asks one with a method `in_epoch(epoch, index)` by that: its samples change from epoch to epoch. One with a
    method `many(wanted, soon)` is asked for a batch of (epoch, index) at a time, and told which come next; its
    `close()` is called once no more are wanted.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Batches(Protocol):
    """The microbatches of one rank, as a pure function of the step, so that a run resumes from one number.

    One whose steps differ in samples says which they take in `places`, a `StepBorders`.
    """

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one pass over the data; None where an epoch means nothing."""
        ...

    def batches(self, step: int) -> list[Any]:
        """Return the microbatches of one optimizer step, 0 and up."""
        ...

    def iterate(self, start_step: int, end_step: int) -> AbstractContextManager[Iterable[list[Any]]]:
        """Give the microbatches of steps start_step .. end_step - 1, one after another."""
        ...

    def state_at(self, num_samples: int) -> Any:
        """Return the place in the data after so many samples, as a checkpoint keeps it: a JSON value."""
        ...
