"""A rank's share of a task's samples, and the interface of batches made of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.config import partitioning as shares
from weft.config.fields.plan_text import MEASURED_SHARES


@dataclass(frozen=True, slots=True)
class Share:
    """The share of samples that data-parallel rank `rank` of `size` reads.

    Attributes:
        global_batch: samples of one optimizer step over all ranks.
        microbatches: number of microbatches of one rank.
        pin: if True, tensors are in pinned memory.
        timeline: shares of the ranks by step, for unequal parts.
    """

    global_batch: int
    microbatches: int = 1
    rank: int = 0
    size: int = 1
    pin: bool = False
    timeline: shares.ShareTimeline = field(default_factory=shares.ShareTimeline, compare=False)

    @property
    def rows(self) -> int:
        """Samples of one microbatch on this rank, if all ranks have equal parts."""
        return max(1, shares.samples_per_microbatch(self.global_batch, self.size, self.microbatches))

    @property
    def most_rows(self) -> int:
        """Samples of the largest microbatch of any rank, at the first step."""
        weights = self.timeline.at(0)
        if weights and weights != MEASURED_SHARES:
            return max(1, -(-max(shares.largest_remainder(self.global_batch, weights)) // self.microbatches))
        return self.rows

    def own(self, step: int) -> list[range]:
        """Return the samples of each microbatch of this rank in a step, as indices in the global batch."""
        weights = self.timeline.at(step)
        return shares.microbatch_samples(self.global_batch, self.size, self.microbatches, self.rank, weights)


class MapDataset(Protocol):
    """Samples by index: a list, or a map-style torch dataset.

    If it has a method `in_epoch(epoch, index)`, training calls it to read samples that change from epoch to epoch. If
    it has a method `many(wanted, soon)`, training reads a list of (epoch, index) per call; `soon` is the list of the
    next call. `close()` of such a dataset is called when no more samples are needed.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Batches(Protocol):
    """The microbatches of one rank, as a pure function of the step, so that a run can resume from any step.

    If steps have different numbers of samples, the object has an attribute `places`, a `StepBorders` with the samples
    of each step.
    """

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one pass over the data, or None if the data has no epochs."""
        ...

    def batches(self, step: int) -> list[Any]:
        """Return the microbatches of an optimizer step, counted from 0."""
        ...

    def iterate(self, start_step: int, end_step: int) -> AbstractContextManager[Iterable[list[Any]]]:
        """Return a context manager whose value iterates over the microbatches of steps start_step .. end_step - 1."""
        ...

    def state_at(self, num_samples: int) -> Any:
        """Return the data position after `num_samples` samples as the JSON value that a checkpoint stores."""
        ...
