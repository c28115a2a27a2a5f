"""Cost-based batching: assignment of a step's samples to ranks and microbatches.

Every rank computes the same assignment from the lengths of all samples of the step, so no communication is needed. A
microbatch is padded to its longest sample, so samples of similar length are grouped. All ranks get the same number of
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weft.config.run_config import RunConfig
from weft.config.shapes.traced_model import Limit, TracedModel
from weft.errors import DataError

if TYPE_CHECKING:
    from torch import nn

#: Fixed cost of a microbatch (launches of many small kernels), as a fraction of its maximum cost.
_CALL = 0.01
#: Number of cost bounds to try, and the maximum number of runs (of all ranks) for which they are tried.
_BOUNDS, _SEARCHED = 4, 32
#: Maximum number of microbatches per step, as a multiple of the plan's. More microbatches can reduce padding.
_MORE = 4
#: Maximum number of positions at which runs may begin when bounds are tried.
_PLACES = 128
#: Tolerance for rounding when sums are compared with a bound.
_NEARLY = 1 + 1e-9


@dataclass(frozen=True)
class Costs:
    """Costs of samples and limits of a microbatch.

    Attributes:
        lengths: length of each training sample by index, in tokens or another padded unit. A second dimension holds
            several quantities that are padded separately.
        cost_of: cost of samples of the given lengths in tokens: FLOPs divided by the FLOPs of one token alone. Returns
            float64 of the same shape, non-decreasing in the length.
        most: maximum cost of a microbatch.
        most_tokens: maximum tokens of a microbatch after padding; None for no limit.
        room: maximum number of microbatches per rank, if more than required reduce padding.
        beside: additional cost of each sample, such as image encoders: float64 (samples,); None for no cost.
    """

    lengths: Sequence[int] | np.ndarray
    cost_of: Callable[[np.ndarray], np.ndarray]
    most: float
    most_tokens: int | None = None
    room: int = 1
    beside: np.ndarray | None = None

    def check(self) -> None:
        """Raise an error for a sample that alone exceeds the maximum cost of a microbatch.

        Raises:
            DataError: for such a sample, with its index.
        """
        lengths = _columns(self.lengths).sum(1)
        found = self.cost_of(lengths) if lengths.size else np.zeros(0)
        found = found if self.beside is None else found + self.beside
        if found.size and found.max() > self.most * _NEARLY:
            number, least = int(found.argmax()), int(np.ceil(found.max()))
            raise DataError(
                f"data.microbatch_cost={self.most:g}: sample {number} of the training data has {lengths[number]} "
                f"tokens, which cost {found[number]:.1f}. Use data.microbatch_cost={least}, or truncate long samples "
                "(train.seq_len)."
            )

    def divide(
        self, indices: Sequence[int], num_ranks: int, weights: Sequence[int] = ()
    ) -> list[list[tuple[int, ...]]]:
        """Return the microbatches of each rank as positions of samples in the step. Every rank has the same number.

        Args:
            indices: indices of the step's samples in the training data, in step order.
            num_ranks: number of ranks that read different samples.
            weights: shares of the ranks in the cost of a step; () for equal costs.
        """
        if len(set(weights)) > 1:
            return self._divide_by_shares(indices, np.array(weights, np.float64))
        lengths = _columns(self.lengths)[np.asarray(indices)]
        # Break ties by index, so that every rank computes the same order.
        order = np.lexsort((np.arange(len(lengths)), *-lengths.T, -lengths.sum(1)))
        beside = None if self.beside is None else self.beside[np.asarray(indices)][order]
        runs = _Runs(lengths[order], self.cost_of, self.most_tokens, beside)
        needed = -(-len(runs.split_at_cost(self.most)) // num_ranks)
        room = max(needed, min(self.room, _SEARCHED // num_ranks))
        counts = [number * num_ranks for number in range(needed, room + 1)]
        found = [runs.even(self.most, count) for count in sorted({counts[0], counts[-1]})]
        least = max(runs.costs_of(found[-1]))
        if counts[-1] <= _SEARCHED:
            # Try to reduce padding compared with runs of equal cost, while ranks stay balanced.
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

    def _divide_by_shares(self, indices: Sequence[int], weights: np.ndarray) -> list[list[tuple[int, ...]]]:
        """Return the microbatches of ranks with unequal shares.

        Samples in order of decreasing cost go to the rank that would have the lowest cost per share. Then the samples
        of each rank are divided into microbatches of similar cost.
        """
        lengths = _columns(self.lengths)[np.asarray(indices)]
        beside = np.zeros(len(lengths)) if self.beside is None else self.beside[np.asarray(indices)]
        costs = np.asarray(self.cost_of(lengths.sum(1)), np.float64) + beside
        rank_of, sums = np.zeros(len(costs), np.int64), np.zeros(len(weights))
        for place in np.argsort(-costs, kind="stable").tolist():
            rank = rank_of[place] = int(np.argmin((sums + costs[place]) / weights))
            sums[rank] += costs[place]
        by_length = np.argsort(-lengths.sum(1), kind="stable")
        orders = [by_length[rank_of[by_length] == rank] for rank in range(len(weights))]
        runs = [_Runs(lengths[order], self.cost_of, self.most_tokens, beside[order]) for order in orders]
        number = max(1, *(len(each.split_at_cost(self.most)) for each in runs))
        cuts = [each.even(self.most, number) if len(order) else [] for each, order in zip(runs, orders, strict=True)]
        return [
            [tuple(sorted(order[run.start : run.stop].tolist())) for run in cut] + [()] * (number - len(cut))
            for cut, order in zip(cuts, orders, strict=True)
        ]

    def _time(self, costs: list[float], num_ranks: int) -> float:
        """Return the cost of a step in tokens, including fixed costs.

        Microbatches run in order of decreasing cost, `num_ranks` at a time, and each such group costs as much as its
        most expensive one.
        """
        rounds = sorted(costs, reverse=True)[::num_ranks]
        return sum(rounds) + _CALL * self.most * len(rounds)


class _Runs:
    """Samples sorted by decreasing length, to be divided into runs (ranges of consecutive samples, a microbatch each).

    Args:
        most_tokens: maximum tokens of a run after padding.
        beside: additional cost of each sample.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        cost_of: Callable[[np.ndarray], np.ndarray],
        most_tokens: int | None,
        beside: np.ndarray | None = None,
    ):
        self._lengths, self._cost_of, self._most_tokens = lengths, cost_of, most_tokens
        #: Prefix sums of the additional costs.
        self._extra_cost_sums = np.zeros(len(lengths) + 1)
        if beside is not None:
            np.cumsum(beside, out=self._extra_cost_sums[1:])
        #: Entry k holds, for each position, the maximum length of the 2**k samples that begin there.
        self._longest = [lengths]
        while 2 ** len(self._longest) <= len(lengths):
            known, apart = self._longest[-1], 2 ** (len(self._longest) - 1)
            self._longest.append(np.maximum(known[:-apart], known[apart:]))

    def split_at_cost(self, bound: float) -> list[range]:
        """Fill one run after another up to a maximum cost. Each run has at least one sample."""
        sizes = self._sizes(bound).tolist()
        found, start = list[range](), 0
        while start < len(sizes):
            found.append(range(start, start + max(1, sizes[start])))
            start = found[-1].stop
        return found

    def _sizes(self, bound: float) -> np.ndarray:
        """Return, for each position, how many samples that begin there fit within a cost bound.

        Searches all positions together by decreasing powers of two, in O(n log n). Cost grows with the number of
        samples.
        """
        sizes, filled = np.zeros(len(self._lengths), np.int64), np.zeros_like(self._lengths)
        for power in reversed(range(len(self._longest))):
            starts = np.flatnonzero(np.arange(len(sizes)) + sizes + 2**power <= len(sizes))
            more, number = np.maximum(filled[starts], self._longest[power][starts + sizes[starts]]), 2**power
            tokens, number = more.sum(1), number + sizes[starts]
            besides = self._extra_cost_sums[starts + number] - self._extra_cost_sums[starts]
            fits = self._cost_of(tokens) * number + besides <= bound * _NEARLY
            if self._most_tokens is not None:
                fits &= tokens * number <= self._most_tokens
            taken = starts[fits]
            sizes[taken], filled[taken] = number[fits], more[fits]
        return sizes

    def even(self, most: float, number: int) -> list[range]:
        """Return at most `number` runs whose maximum cost is lowest, to within 0.2 %.

        `split_at_cost(most)` must give at most `number` runs. No run costs more than `most`, if no single sample does.
        """
        low, high = 0.0, most
        while high - low > 2e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if len(self.split_at_cost(middle)) <= number else (middle, high)
        return self.split_at_cost(high)

    def least_filled(self, bound: float, numbers: Sequence[int]) -> list[list[range]]:
        """Return, for each entry of `numbers`, at most that many runs with the lowest total cost.

        No run exceeds the cost bound. Entries without a solution are omitted. Uses dynamic programming over up to
        `_PLACES` positions at which runs may begin.
        """
        step = -(-len(self._lengths) // _PLACES)
        places = [*range(0, len(self._lengths), step), len(self._lengths)]
        weights = np.full((len(places), len(places)), np.inf)
        for row, start in enumerate(places[:-1]):
            filled = np.maximum.accumulate(self._lengths[start:]).sum(1)
            ends = np.array(places[row + 1 :]) - start
            besides = self._extra_cost_sums[start + ends] - self._extra_cost_sums[start]
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
        """Return the cost of each run, padded to its longest sample."""
        filled = np.array([self._lengths[run.start : run.stop].max(0).sum() for run in cut], np.int64)
        besides = [float(self._extra_cost_sums[run.stop] - self._extra_cost_sums[run.start]) for run in cut]
        costs = self._cost_of(filled)
        return [float(cost) * len(run) + more for cost, run, more in zip(costs, cut, besides, strict=True)]


def _dealt(costs: list[float], num_ranks: int) -> list[list[int]]:
    """Assign runs to ranks, `num_ranks` runs at a time, in order of decreasing cost.

    The rank with the lowest sum so far gets the largest of them. Runs of the same index have similar costs, which
    matters if every layer synchronizes ranks (zero=3). The sums per rank are similar, which matters if ranks only
    synchronize once per step.
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
    """Return lengths as int64 (samples, padded columns)."""
    found = np.asarray(lengths, np.int64)
    return found[:, None] if found.ndim == 1 else found


class CostTask(Protocol):
    """Attributes and methods of a task that cost-based batching uses: lengths of its samples, and their costs."""

    config: RunConfig
    fills_seq_len: bool

    def lengths(self) -> Sequence[int] | np.ndarray | None: ...
    def length_costs(self, lengths: np.ndarray) -> np.ndarray: ...
    def extra_costs(self) -> np.ndarray | None: ...


def costs_of(task: CostTask, rows: int, num_microbatches: int) -> Costs | None:
    """Return the costs of a task's samples, or None for fixed batches.

    Args:
        task: an opened or prepared task.
        rows: samples per microbatch of the plan.
        num_microbatches: the plan's microbatches per rank.

    Raises:
        DataError: if a sample costs more than `data.microbatch_cost`.
    """
    data = task.config.data
    if data.batching == "fixed":
        return None
    lengths, table = _lengths_and_table(task)
    longest, beside = len(table) - 1, task.extra_costs()

    def cost_of(some: np.ndarray) -> np.ndarray:
        return table[some]

    if data.microbatch_cost == "auto":
        most = rows * (float(table[longest]) + (0.0 if beside is None else float(beside.max(initial=0.0))))
        return Costs(lengths, cost_of, most, rows * longest, _MORE * num_microbatches, beside)
    found = Costs(lengths, cost_of, data.microbatch_cost, room=_MORE * num_microbatches, beside=beside)
    found.check()
    return found


def own_costs(task: CostTask) -> np.ndarray:
    """Return the cost of each training sample of a task without padding, in tokens: float64 (samples,)."""
    lengths, table = _lengths_and_table(task)
    found, beside = table[_columns(lengths).sum(1)], task.extra_costs()
    return found if beside is None else found + beside


def _lengths_and_table(task: CostTask) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of a task's samples and a table of costs by length, up to the maximum length."""
    given = task.lengths()
    lengths = np.asarray(() if given is None else given, np.int64)
    least = task.config.train.seq_len if task.fills_seq_len else 1
    longest = max(least, int(_columns(lengths).max(0, initial=1).sum()))
    return lengths, np.maximum.accumulate(np.asarray(task.length_costs(np.arange(longest + 1)), np.float64))


def traced_costs(traced: TracedModel | None, lengths: np.ndarray) -> np.ndarray:
    """Return a model's traced FLOPs for samples of the given lengths, divided by the FLOPs of one token.

    Without a trace, or if the model's FLOPs do not depend on a sequence length, return the lengths.
    """
    if traced is None or not traced.reads_sequence:
        return np.asarray(lengths, np.float64)
    asked = np.asarray(lengths, np.float64)
    return np.asarray(traced.flops(1.0, asked)) / float(traced.flops(1.0, 1.0))


def cost_limits(config: RunConfig) -> Mapping[str, Limit]:
    """Return the limits of plan fields under cost-based batching; {} for batching=fixed."""
    if config.data.batching == "fixed":
        return {}
    return {
        "pp": Limit((1,), "with data.batching=cost steps differ in microbatches, and a pipeline counts them before")
    }


# Range of samples that each step reads, in the sequence of training samples over all epochs: of fixed size, or by cost.


class StepBorders:
    """Boundaries between steps, as a pure function of the step. Positions count from 0 over all epochs."""

    def first(self, step: int) -> int:
        """Return the first position of a step, which is the number of samples in all earlier steps."""
        raise NotImplementedError

    def step_at(self, place: int) -> int:
        """Return the step that contains a position."""
        raise NotImplementedError

    def steps(self, num_samples: int) -> float:
        """Return the number of steps that `num_samples` samples fill. A partial last step counts as a fraction."""
        step = self.step_at(num_samples)
        first = self.first(step)
        return step + (num_samples - first) / (self.first(step + 1) - first)

    @staticmethod
    def of(batches: object, global_batch: int) -> StepBorders:
        """Return `batches.places` (the step boundaries) if it exists, else steps of `global_batch` samples."""
        return getattr(batches, "places", None) or EvenBorders(global_batch)

    @staticmethod
    def of_task(task: CostTask, order: Callable[[int, int], np.ndarray]) -> StepBorders:
        """Return the step boundaries of a task: by train.global_cost if it is set, else by train.global_batch.

        Args:
            task: a prepared or opened task.
            order: (number of samples, epoch) -> the sample indices of the epoch in training order, int64 (samples,).
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
    """Steps of consecutive samples whose total cost is at most `most`.

    A sample that alone costs more than `most` is a separate step. No step is empty. Steps may span the end of an epoch.

    Args:
        costs_in_order: returns the costs of an epoch's samples in that epoch's order: float64 (samples,).
        num_samples: samples per epoch.
        most: maximum cost of a step.

    Raises:
        DataError: if there are no samples.
    """

    def __init__(self, costs_in_order: Callable[[int], np.ndarray], num_samples: int, most: float):
        if not num_samples:
            raise DataError("task: it has no training samples. Let samples('train') return some.")
        self._costs, self._num_samples, self._most = costs_in_order, num_samples, most * _NEARLY
        #: First position of each step so far (the last step is incomplete), and the cost of that last step.
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
        """Add the step boundaries of one more epoch, with one binary search per step."""
        before = self._epochs * self._num_samples
        sums = np.concatenate(([0.0], np.cumsum(self._costs(self._epochs))))
        start = 0
        while start < self._num_samples:
            stop = int(np.searchsorted(sums, sums[start] + self._most - self._used, side="right")) - 1
            stop = max(stop, start)  # an incomplete step of the previous epoch may be full
            if before + stop == self._firsts[-1]:  # the first sample alone exceeds the maximum
                stop = start + 1
            if stop == self._num_samples:  # samples of the next epoch may still fit
                self._used += float(sums[stop] - sums[start])
                break
            self._firsts.append(before + stop)
            self._used, start = 0.0, stop
        self._epochs += 1


# Cost of tokens, from the weights of the transformer's blocks and from attention, in multiply-adds (half of the FLOPs).


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Cost of a transformer in multiply-adds: `weights` per token, and `per_pair` per pair of tokens in attention."""

    weights: float
    per_pair: float

    @staticmethod
    def of(module: nn.Module, num_layers: int, dim: int) -> TokenCosts:
        """Return the costs of a module with attention blocks. Weights of nn.Embedding are not counted, even if tied.

        Args:
            module: the transformer.
            num_layers: number of blocks.
            dim: width.
        """
        from torch import nn

        layers = [one for one in module.modules() if not isinstance(one, nn.Embedding)]
        # By id, because an output layer may share the weight of an embedding.
        params = {id(param): param for one in layers for param in one.parameters(recurse=False)}
        weights = sum(param.numel() for param in params.values())
        # A token costs 2 FLOPs for each weight, and 4 for each attended token, for each feature of each layer.
        return TokenCosts(float(weights), 2.0 * num_layers * dim)

    def work(self, tokens: Any) -> np.ndarray:
        """Return the cost in multiply-adds of sequences of the given lengths, in the same shape."""
        asked = np.asarray(tokens, np.float64)
        return asked * (self.weights + self.per_pair * asked)
