"""How the samples of a step lie on ranks and in microbatches, found by cost.

Every rank computes it alike from the lengths of all samples of the step, so nothing is sent. A microbatch is filled up
to its longest sample, so it holds samples that are alike in length; all ranks get equally many microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from weft.config.run_config import RunConfig
from weft.config.traced_model import Limit, TracedModel
from weft.errors import DataError

#: What a microbatch costs beside its samples, as a share of what it may hold: calls of many small kernels.
_CALL = 0.01
#: Bounds of a microbatch's cost that are tried, and the runs of all ranks up to which they are.
_BOUNDS, _SEARCHED = 4, 32
#: Into how many more microbatches than the plan's a step may be cut, where that leaves less to fill up.
_MORE = 4
#: Places at most where runs may begin, in that search.
_PLACES = 128
#: What sums may be above a bound by rounding.
_NEARLY = 1 + 1e-9


@dataclass(frozen=True)
class Costs:
    """What samples cost, and how much a microbatch may hold.

    lengths: of each sample of the training data, by its index, in tokens or what else a batch is filled up to; with a
    second dimension, of several things that are filled up each.
    cost_of: cost of samples of such lengths, in tokens: FLOPs, divided by those of one token alone; float64, of the
    same shape, and never less for a longer one. most: cost of a microbatch. most_tokens: tokens of one, filled up;
    None: any number. room: microbatches of a rank, up to which a step may be cut into more of them than it must.
    beside: what each sample costs besides, such as encoders of its pictures: float64 (samples,); None: nothing.
    """

    lengths: Sequence[int] | np.ndarray
    cost_of: Callable[[np.ndarray], np.ndarray]
    most: float
    most_tokens: int | None = None
    room: int = 1
    beside: np.ndarray | None = None

    def check(self) -> None:
        """Refuse a sample that alone costs more than a microbatch may.

        Raises:
            DataError: for such a sample, with its number.
        """
        lengths = _columns(self.lengths).sum(1)
        found = self.cost_of(lengths) if lengths.size else np.zeros(0)
        found = found if self.beside is None else found + self.beside
        if found.size and found.max() > self.most * _NEARLY:
            number, least = int(found.argmax()), int(np.ceil(found.max()))
            raise DataError(
                f"data.microbatch_cost={self.most:g}: sample {number} of the training data has {lengths[number]} "
                f"tokens, which cost {found[number]:.1f}. Use data.microbatch_cost={least}, or cut long samples "
                "(train.seq_len)."
            )

    def divide(self, indices: Sequence[int], num_ranks: int) -> list[list[tuple[int, ...]]]:
        """Return the microbatches of each rank as numbers of samples in the step, equally many for every rank.

        Args:
            indices: of the step's samples in the training data, in the order of the step.
            num_ranks: that read different samples.
        """
        lengths = _columns(self.lengths)[np.asarray(indices)]
        # Ties by number: the order is the same wherever it is computed.
        order = np.lexsort((np.arange(len(lengths)), *-lengths.T, -lengths.sum(1)))
        beside = None if self.beside is None else self.beside[np.asarray(indices)][order]
        runs = _Runs(lengths[order], self.cost_of, self.most_tokens, beside)
        needed = -(-len(runs.cut(self.most)) // num_ranks)
        room = max(needed, min(self.room, _SEARCHED // num_ranks))
        counts = [number * num_ranks for number in range(needed, room + 1)]
        found = [runs.even(self.most, count) for count in sorted({counts[0], counts[-1]})]
        least = max(runs.costs_of(found[-1]))
        if counts[-1] <= _SEARCHED:
            # Less filling than runs of equal cost have, as long as ranks still come out even.
            for bound in np.geomspace(least, max(least, self.most), _BOUNDS):
                found += runs.least_filled(float(bound), counts)
        best = min(found, key=lambda cut: self._time(runs.costs_of(cut), num_ranks))
        dealt = _dealt(runs.costs_of(best), num_ranks)
        number = max(map(len, dealt))
        return [
            [tuple(sorted(order[best[one].start : best[one].stop].tolist())) for one in own]
            + [()] * (number - len(own))
            for own in dealt
        ]

    def _time(self, costs: list[float], num_ranks: int) -> float:
        """What a step takes: the most costly microbatch of each round, and the calls. In tokens."""
        rounds = sorted(costs, reverse=True)[::num_ranks]
        return sum(rounds) + _CALL * self.most * len(rounds)


class _Runs:
    """Samples from the longest to the shortest, cut into runs. most_tokens: of a run, filled up.

    beside: what each costs besides.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        cost_of: Callable[[np.ndarray], np.ndarray],
        most_tokens: int | None,
        beside: np.ndarray | None = None,
    ):
        self._lengths, self._cost_of, self._most_tokens = lengths, cost_of, most_tokens
        #: What all samples before each place cost besides.
        self._incompatible_setting = np.zeros(len(lengths) + 1)
        if beside is not None:
            np.cumsum(beside, out=self._incompatible_setting[1:])
        #: Of each power of two: the longest of so many samples from each place on.
        self._longest = [lengths]
        while 2 ** len(self._longest) <= len(lengths):
            known, apart = self._longest[-1], 2 ** (len(self._longest) - 1)
            self._longest.append(np.maximum(known[:-apart], known[apart:]))

    def cut(self, bound: float) -> list[range]:
        """Fill runs up to a cost, one after another; a run holds at least one sample."""
        sizes = self._sizes(bound).tolist()
        found, start = list[range](), 0
        while start < len(sizes):
            found.append(range(start, start + max(1, sizes[start])))
            start = found[-1].stop
        return found

    def _sizes(self, bound: float) -> np.ndarray:
        """How many samples from each place on keep within a bound: the more, the more they cost.

        All places at once, by powers of two from the largest on: the work grows as n log n, whatever the runs.
        """
        sizes, filled = np.zeros(len(self._lengths), np.int64), np.zeros_like(self._lengths)
        for power in reversed(range(len(self._longest))):
            starts = np.flatnonzero(np.arange(len(sizes)) + sizes + 2**power <= len(sizes))
            more, number = np.maximum(filled[starts], self._longest[power][starts + sizes[starts]]), 2**power
            tokens, number = more.sum(1), number + sizes[starts]
            besides = self._incompatible_setting[starts + number] - self._incompatible_setting[starts]
            fits = self._cost_of(tokens) * number + besides <= bound * _NEARLY
            if self._most_tokens is not None:
                fits &= tokens * number <= self._most_tokens
            taken = starts[fits]
            sizes[taken], filled[taken] = number[fits], more[fits]
        return sizes

    def even(self, most: float, number: int) -> list[range]:
        """Return at most `number` runs, the most costly of which costs least, and no more than `most`."""
        low, high = 0.0, most
        while high - low > 2e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if len(self.cut(middle)) <= number else (middle, high)
        return self.cut(high)

    def least_filled(self, bound: float, numbers: Sequence[int]) -> list[list[range]]:
        """Return for each number at most so many runs within a bound of cost, whose costs add up to the least.

        Where there are none, none is returned. Dynamic programming over the places between samples.
        """
        step = -(-len(self._lengths) // _PLACES)
        places = [*range(0, len(self._lengths), step), len(self._lengths)]
        weights = np.full((len(places), len(places)), np.inf)
        for row, start in enumerate(places[:-1]):
            filled = np.maximum.accumulate(self._lengths[start:]).sum(1)
            ends = np.array(places[row + 1 :]) - start
            besides = self._incompatible_setting[start + ends] - self._incompatible_setting[start]
            costs = self._cost_of(filled[ends - 1]) * ends + besides
            fits = (costs <= bound * _NEARLY) & (filled[ends - 1] * ends <= (self._most_tokens or np.inf))
            weights[row, row + 1 :] = np.where(fits, costs, np.inf)
        sums = np.where(np.arange(len(places)) == 0, 0.0, np.inf)
        best, came, found = [sums], list[np.ndarray](), list[list[range]]()
        for _ in range(max(numbers)):
            whole = best[-1][:, None] + weights
            came.append(whole.argmin(0))
            best.append(whole.min(0))
        for number in numbers:
            used = min(range(1, number + 1), key=lambda one: best[one][-1])
            if np.isfinite(best[used][-1]):
                ends = [len(places) - 1]
                for row in reversed(came[:used]):
                    ends.append(int(row[ends[-1]]))
                found.append([range(places[start], places[stop]) for stop, start in pairwise(ends)])
                found[-1].reverse()
        return found

    def costs_of(self, cut: list[range]) -> list[float]:
        """Cost of each run, filled up to its longest sample."""
        filled = np.array([self._lengths[run.start : run.stop].max(0).sum() for run in cut], np.int64)
        besides = [float(self._incompatible_setting[run.stop] - self._incompatible_setting[run.start]) for run in cut]
        costs = self._cost_of(filled)
        return [float(cost) * len(run) + more for cost, run, more in zip(costs, cut, besides, strict=True)]


def _dealt(costs: list[float], num_ranks: int) -> list[list[int]]:
    """Deal runs to ranks, the most costly first: in every round one for each rank, the largest to who has least.

    Where every layer waits for all ranks (zero=3), the microbatches of a round are alike; where only steps wait, the
    sums are.
    """
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    largest = sorted(range(len(costs)), key=lambda one: (-costs[one], one))
    for first in range(0, len(largest), num_ranks):
        takers = sorted(range(num_ranks), key=lambda rank: (sums[rank], rank))
        for rank, one in zip(takers, largest[first : first + num_ranks], strict=False):
            found[rank].append(one)
            sums[rank] += costs[one]
    return found


def _columns(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Lengths, int64 (samples, columns that are filled up)."""
    found = np.asarray(lengths, np.int64)
    return found[:, None] if found.ndim == 1 else found


class CostTask(Protocol):
    """What is asked of a task."""

    config: RunConfig
    fills_seq_len: bool

    def lengths(self) -> Sequence[int] | np.ndarray | None: ...
    def length_costs(self, lengths: np.ndarray) -> np.ndarray: ...
    def costs_beside(self) -> np.ndarray | None: ...


def costs_of(task: CostTask, rows: int, num_microbatches: int) -> Costs | None:
    """Return what a task's samples cost, as its config asks; None of fixed batches.

    Args:
        task: opened, or prepared.
        rows: samples of one of the plan's microbatches.
        num_microbatches: of the plan, for each rank.

    Raises:
        DataError: where a sample costs more than a microbatch may.
    """
    data = task.config.data
    if data.batching == "fixed":
        return None
    lengths, table = _lengths_and_table(task)
    longest, beside = len(table) - 1, task.costs_beside()

    def cost_of(some: np.ndarray) -> np.ndarray:
        return table[some]

    if data.microbatch_cost == "auto":
        most = rows * (float(table[longest]) + (0.0 if beside is None else float(beside.max(initial=0.0))))
        return Costs(lengths, cost_of, most, rows * longest, _MORE * num_microbatches, beside)
    found = Costs(lengths, cost_of, data.microbatch_cost, room=_MORE * num_microbatches, beside=beside)
    found.check()
    return found


def own_costs(task: CostTask) -> np.ndarray:
    """Return what each training sample of a task costs alone, by its own length, in tokens: float64 (samples,)."""
    lengths, table = _lengths_and_table(task)
    found, beside = table[_columns(lengths).sum(1)], task.costs_beside()
    return found if beside is None else found + beside


def _lengths_and_table(task: CostTask) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a task's samples, and what a sample of each length costs, up to the longest that there may be."""
    given = task.lengths()
    lengths = np.asarray(() if given is None else given, np.int64)
    least = task.config.train.seq_len if task.fills_seq_len else 1
    longest = max(least, int(_columns(lengths).max(0, initial=1).sum()))
    return lengths, np.maximum.accumulate(np.asarray(task.length_costs(np.arange(longest + 1)), np.float64))


def traced_costs(traced: TracedModel | None, lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of samples of some lengths by the trace of a model, divided by those of one token alone."""
    if traced is None or not traced.reads_sequence:
        return np.asarray(lengths, np.float64)
    asked = np.asarray(lengths, np.float64)
    return np.asarray(traced.flops(1.0, asked)) / float(traced.flops(1.0, 1.0))


def cost_limits(config: RunConfig) -> Mapping[str, Limit]:
    """Return which fields of a plan batches by cost narrow."""
    if config.data.batching == "fixed":
        return {}
    return {
        "pp": Limit((1,), "with data.batching=cost steps differ in microbatches, and a pipeline counts them before")
    }


# Which places of the endless row of training samples each step takes: equally many, or as many as a cost allows.

#: What a sum may be above a bound by rounding.


class StepBorders:
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
    def of(batches: object, global_batch: int) -> StepBorders:
        """Return which samples the steps of some batches take: what these say, or global_batch each."""
        return getattr(batches, "places", None) or EvenBorders(global_batch)

    @staticmethod
    def of_task(task: CostTask, order: Callable[[int, int], np.ndarray]) -> StepBorders:
        """Return which samples the steps of a task take: train.global_batch, or what train.global_cost allows.

        Args:
            task: prepared, or opened.
            order: gives the indices of so many samples in the order of an epoch, int64 (samples,).
        """
        most = task.config.train.global_cost
        if most is None:
            return EvenBorders(task.config.train.global_batch)
        costs = own_costs(task)
        return CostBorders(lambda epoch: costs[order(len(costs), epoch)], len(costs), most)


class EvenBorders(StepBorders):
    """Steps of `size` samples."""

    def __init__(self, size: int):
        self._size = size

    def first(self, step: int) -> int:
        return step * self._size

    def step_at(self, place: int) -> int:
        return place // self._size


class CostBorders(StepBorders):
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
