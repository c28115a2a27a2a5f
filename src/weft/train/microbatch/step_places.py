"""Which places of the endless row of training samples each step takes: equally many, or as many as a cost allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.errors import DataError
from weft.train.microbatch.by_cost import CostTask, alone_costs

#: What a sum may be above a bound by rounding.
_NEARLY = 1 + 1e-9


class StepPlaces:
    """Borders of steps, as a pure function of the step. Places count from 0 and over all epochs, as steps do."""

    def first(self, step: int) -> int:
        """Return the first place of a step: the samples of all steps before."""
        raise NotImplementedError

    def step_at(self, place: int) -> int:
        """Return the step that takes a place."""
        raise NotImplementedError

    def steps(self, num_samples: int) -> float:
        """Return how many steps the first samples take: the last one in part where it takes more."""
        step = self.step_at(num_samples)
        first = self.first(step)
        return step + (num_samples - first) / (self.first(step + 1) - first)

    @staticmethod
    def of(batches: object, global_batch: int) -> StepPlaces:
        """Return which samples the steps of some batches take: what these say, or global_batch each."""
        return getattr(batches, "places", None) or EvenPlaces(global_batch)

    @staticmethod
    def of_task(task: CostTask, order: Callable[[int, int], np.ndarray]) -> StepPlaces:
        """Return which samples the steps of a task take: train.global_batch, or what train.global_cost allows.

        Args:
            task: prepared, or opened.
            order: gives the indices of so many samples in the order of an epoch, int64 (samples,).
        """
        most = task.config.train.global_cost
        if most is None:
            return EvenPlaces(task.config.train.global_batch)
        costs = alone_costs(task)
        return CostPlaces(lambda epoch: costs[order(len(costs), epoch)], len(costs), most)


class EvenPlaces(StepPlaces):
    """Steps of `size` samples."""

    def __init__(self, size: int):
        self._size = size

    def first(self, step: int) -> int:
        return step * self._size

    def step_at(self, place: int) -> int:
        return place // self._size


class CostPlaces(StepPlaces):
    """Steps that take samples in their order while these cost no more than `most` together.

    A sample that alone costs more is a step of its own, and no step is empty. Steps go on over the end of an epoch.

    Args:
        costs_in_order: what the samples of an epoch cost, in the order of that epoch: float64 (samples,).
        num_samples: of an epoch.
        most: cost of a step.
    """

    def __init__(self, costs_in_order: Callable[[int], np.ndarray], num_samples: int, most: float):
        if not num_samples:
            raise DataError("task: it has no training samples. Let samples('train') return some.")
        self._costs, self._num_samples, self._most = costs_in_order, num_samples, most * _NEARLY
        #: First places of the steps so far, the last of which is still open, and what that one costs yet.
        self._firsts, self._used = [0], 0.0
        self._epochs = 0

    def first(self, step: int) -> int:
        while len(self._firsts) <= step:
            self._add_epoch()
        return self._firsts[step]

    def step_at(self, place: int) -> int:
        while self._firsts[-1] <= place:
            self._add_epoch()
        return int(np.searchsorted(self._firsts, place, side="right")) - 1

    def _add_epoch(self) -> None:
        """Cut one more epoch: a search for each step, not for each sample."""
        before = self._epochs * self._num_samples
        sums = np.concatenate(([0.0], np.cumsum(self._costs(self._epochs))))
        start = 0
        while start < self._num_samples:
            stop = int(np.searchsorted(sums, sums[start] + self._most - self._used, side="right")) - 1
            stop = max(stop, start)  # a step that is open from the epoch before may have no room
            if before + stop == self._firsts[-1]:  # the first sample alone is too much
                stop = start + 1
            if stop == self._num_samples:  # there may be room for samples of the next epoch
                self._used += float(sums[stop] - sums[start])
                break
            self._firsts.append(before + stop)
            self._used, start = 0.0, stop
        self._epochs += 1
