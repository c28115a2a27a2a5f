"""Layers to stages: as even as whole layers allow, when the first stage also holds the embedding and the last the head.

The longest of all ranks decides the pace of a pipeline, so it is the longest that is made short: a bound is halved
until no smaller one can be kept, and ranks are filled up to it (the classic linear partition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def split_stages(
    num_layers: int, stages: Sequence[Sequence[int]], *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers of each stage, stages counted from the embedding; every stage holds at least one where there are enough.

    stages: those of each rank. first, last: what the first and the last stage hold besides, in layers' time.
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
