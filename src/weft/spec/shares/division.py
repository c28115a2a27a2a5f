"""Who gets what: layers to stages, samples to microbatches. Runtime, planner and tests ask here.

A chain of layers is divided so that the slowest stage is as fast as can be: it sets the pace of the pipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

from weft.spec.divisors import common_divisors


def batch_unit(data_ranks: int, num_microbatches: int) -> int:
    """Return the number of samples of which a global batch is a multiple: one for each microbatch of each rank."""
    return data_ranks * num_microbatches


@overload
def samples_per_microbatch(global_batch: int, data_ranks: int, num_microbatches: int) -> int: ...
@overload
def samples_per_microbatch(global_batch: int, data_ranks: Any, num_microbatches: Any) -> Any: ...
def samples_per_microbatch(global_batch: int, data_ranks: Any, num_microbatches: Any) -> Any:
    """Return how many samples one microbatch of one rank holds, in whole ones.

    Args:
        global_batch: samples of a step.
        data_ranks: ranks that see different samples; an array gives an array.
        num_microbatches: of each of them, or an array.
    """
    return global_batch // batch_unit(data_ranks, num_microbatches)


def even_passes(global_batch: int, data_ranks: int) -> list[int]:
    """List the numbers of microbatches into which ranks can cut their samples evenly; none where they cannot."""
    return [] if global_batch % data_ranks else common_divisors(global_batch // data_ranks)


def share_out(count: int, num_parts: int) -> list[range]:
    """Divide 0 to count - 1 into runs in order: the first may have one more than the others, which may be empty."""
    size, rest = divmod(count, num_parts)
    starts = [part * size + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def microbatch_samples(global_batch: int, data_ranks: int, num_microbatches: int, rank: int) -> list[range]:
    """Return the samples of each microbatch of a rank, by their numbers in the global batch.

    The batch is shared out as the first microbatch of every rank, then the second of every rank, and so on. So ranks
    differ by at most one sample, as do microbatches; the last ones may be empty.

    Args:
        global_batch: samples of a step.
        data_ranks: ranks that see different samples.
        num_microbatches: of each of them.
        rank: the place of this one among them.
    """
    return share_out(global_batch, batch_unit(data_ranks, num_microbatches))[rank::data_ranks]


def divide_layers(
    costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[int, ...]:
    """Return how many layers each stage takes, so that the most costly stage costs least; at least one each.

    Among equally good divisions the one whose later stages have most: they hold fewer activations.

    Args:
        costs: of each layer, in any unit.
        num_stages: of the whole model.
        before: cost of what the first stage has besides (the embedding).
        after: cost of what the last one has besides (norm, head, loss).

    Raises:
        ValueError: for fewer layers than stages.
    """
    return _divided(tuple(costs), num_stages, before, after)


@functools.lru_cache(maxsize=256)
def _divided(costs: tuple[float, ...], num_stages: int, before: float, after: float) -> tuple[int, ...]:
    """What `divide_layers` returns. A search asks for one division several times."""
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers are fewer than {num_stages} stages")
    sums = [0.0, *accumulate(costs)]
    # least[n]: the least cost of the most costly stage when the first n layers lie in the stages so far.
    least = [0.0] + [float("inf")] * num_layers
    cuts: list[list[int]] = []
    for stage in range(num_stages):
        extra = (before if stage == 0 else 0.0) + (after if stage == num_stages - 1 else 0.0)
        following, cut = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            for start in range(stage, end):
                if least[start] >= following[end]:
                    break  # it costs no less the more layers lie before
                cost = max(least[start], sums[end] - sums[start] + extra)
                if cost < following[end] * (1 - 1e-12):
                    following[end], cut[end] = cost, start
        cuts.append(cut)
        least = following
    counts: list[int] = []
    end = num_layers
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return _evened(tuple(reversed(counts)), costs, least[num_layers], before, after)


def _evened(
    counts: tuple[int, ...], costs: Sequence[float], limit: float, before: float, after: float
) -> tuple[int, ...]:
    """The same pace with no stage needlessly small: layers move to a lighter neighbour while that evens both."""
    ends = list(accumulate(counts))
    stages = len(counts)

    def cost(stage: int) -> float:
        start = ends[stage - 1] if stage else 0
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sum(costs[start : ends[stage]]) + extra

    for _ in range(stages * len(costs)):
        moved = False
        for stage in range(stages - 1):
            left, right = cost(stage), cost(stage + 1)
            for step, giver in ((-1, left), (1, right)):
                layer = costs[ends[stage] - 1] if step < 0 else costs[min(ends[stage], len(costs) - 1)]
                size = ends[stage] - (ends[stage - 1] if stage else 0) if step < 0 else ends[stage + 1] - ends[stage]
                taker = right if step < 0 else left
                if size > 1 and taker + layer < giver and taker + layer <= limit * (1 + 1e-12):
                    ends[stage] += step
                    moved = True
                    break
        if not moved:
            break
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def divide_by_rank(
    num_layers: int, stages: Sequence[Sequence[int]], *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Divide equal layers among stages so that the rank with most to do has least, where ranks hold several stages.

    A bound is halved until no smaller one can be kept, and ranks are filled up to it (the classic linear partition).
    Stages are counted from the embedding; every stage holds at least one layer where there are enough.

    Args:
        num_layers: of the whole model.
        stages: those of each rank.
        first: what the first stage holds besides, in layers' time.
        last: what the last stage holds besides, in layers' time.
    """
    num_stages = sum(map(len, stages))
    owner = {stage: rank for rank, own in enumerate(stages) for stage in own}
    extra = [0.0] * len(stages)
    extra[owner[0]] += first
    extra[owner[num_stages - 1]] += last
    most = _layers_by_rank(num_layers, [len(own) for own in stages], extra)
    found = [0] * num_stages
    for rank, own in enumerate(stages):
        # The stages beside embedding and head are relieved first.
        order = sorted(own, key=lambda stage: (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0))
        for index in range(most[rank]):
            found[order[index % len(order)]] += 1
    return found


def _layers_by_rank(num_layers: int, num_stages: Sequence[int], extra: Sequence[float]) -> list[int]:
    """Layers of each rank so that the longest rank is as short as can be."""

    def room(bound: float) -> list[int]:
        return [max(count, math.floor(bound - more + 1e-9)) for count, more in zip(num_stages, extra, strict=True)]

    low, high = 0.0, num_layers + max(extra) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(room(middle)) >= num_layers else (middle, high)
    found = room(high)
    surplus = sum(found) - num_layers
    while surplus > 0:  # take from the longest, the last of equals: late ranks have least in flight
        able = [rank for rank, count in enumerate(found) if count > num_stages[rank]]
        if not able:
            break
        rank = max(able, key=lambda rank: (found[rank] + extra[rank], rank))
        found[rank] -= 1
        surplus -= 1
    return found
