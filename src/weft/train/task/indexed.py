"""Batches of samples that have an index: the order is a pure function of (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import default_collate

from weft.data import Prefetch
from weft.data.batch import map_tensors
from weft.data.order import permutation
from weft.errors import DataError
from weft.train.task.share import MapDataset, Share


class IndexedBatches:
    """The microbatches of one rank.

    Microbatch a of rank r at step s holds the places s * global_batch + (a * size + r) * rows + [0, rows) of an
    endless row of epochs, each a permutation of all samples. Samples are read in a thread, two steps ahead.
    """

    def __init__(self, samples: MapDataset, share: Share, *, seed: int):
        if not len(samples):
            raise DataError("task: it has no training samples. Let samples('train') return some.")
        self._samples, self._share, self._seed = samples, share, seed

    @property
    def samples_per_epoch(self) -> int:
        return len(self._samples)

    def batches(self, step: int) -> list[Any]:
        share = self._share
        first = step * share.global_batch + share.rank * share.rows
        starts = [first + number * share.size * share.rows for number in range(share.microbatches)]
        return [_stacked([self._at(start + row) for row in range(share.rows)], share) for start in starts]

    def iterate(self, start_step: int, end_step: int) -> Prefetch:
        return Prefetch(self, start_step, end_step)

    def state_at(self, num_samples: int) -> dict[str, int]:
        epoch, index = divmod(num_samples, len(self._samples))
        return {"epoch": epoch, "index": index}

    def _at(self, place: int) -> Any:
        epoch, rest = divmod(place, len(self._samples))
        return self._samples[permutation(len(self._samples), "task", self._seed, epoch)(rest)]


class _EvalBatches:
    """The first samples of an evaluation set, in whole global batches, in order."""

    def __init__(self, samples: MapDataset, share: Share, num_batches: int):
        self._samples, self._share, self._num_batches = samples, share, num_batches

    def __iter__(self) -> Iterator[Any]:
        share = self._share
        for call in range(self._num_batches * share.microbatches):
            first = (call * share.size + share.rank) * share.rows
            yield _stacked([self._samples[first + row] for row in range(share.rows)], share)


def evaluation_batches(samples: MapDataset | None, share: Share, most: int) -> Iterable[Any] | None:
    """At most `most` global batches of the samples, the same ones at any number of ranks; None of no samples.

    Raises DataError where there are fewer than one global batch.
    """
    if samples is None or not len(samples):
        return None
    if len(samples) < share.global_batch:
        raise DataError(
            f"task: it has {len(samples)} evaluation samples, and an evaluation reads whole batches of "
            f"train.global_batch={share.global_batch}. Give at least as many, or return None."
        )
    return _EvalBatches(samples, share, min(most, len(samples) // share.global_batch))


def _stacked(samples: list[Any], share: Share) -> Any:
    batch = default_collate(samples)
    return map_tensors(lambda tensor: tensor.pin_memory(), batch) if share.pin else batch
