"""How a chain of layers is divided into the stages of a pipeline: the slowest stage sets the pace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def divide_layers(
    costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[int, ...]:
    """How many layers each stage takes, so that the most costly stage costs least; at least one each.

    costs: of each layer, in any unit. before: of what the first stage has besides (the embedding); after: of what the
    last one has (norm, head, loss). Among equally good divisions the one whose later stages have most: they hold
    fewer activations. Raises ValueError for fewer layers than stages.
    """
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
