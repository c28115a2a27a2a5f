"""What ranks of a host wait for each other, besides what a collective takes.

Who comes to a meeting late is chance: the longer ranks compute before it, the longer the others wait, and the more so
where they share cores. Measured as `meeting` (calibrate/traffic.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.columns import Columns
from weft.planner.measured.laws import Laws
from weft.spec.plan import RECOMPUTES

Array = NDArray[np.float64]


def waiting_s(
    columns: Columns, laws: Laws, layers: Array, passes: Array, compute_s: Array, pieces: Array
) -> dict[str, Array]:
    """Seconds of a step by the term that they lengthen.

    layers: of the busiest rank. passes: of a step. compute_s: of one pass. pieces: in which gradients travel.
    """
    again = np.where(columns.recompute == RECOMPUTES.index("none"), 0, 1)
    data = columns.dp_replicate * columns.dp_shard
    by_unit = columns.zero == 3
    # How often a layer meets: over tp for attention and feed-forward, forward, backward and in what is made again; over
    # cp once in each; of ZeRO 3 for forward, for backward and with its gradients.
    often = {
        "tp": (columns.tp, 4 + 2 * again),
        "cp": (columns.cp, 2 + again),
        "dp_exposed": (np.where(by_unit, data, 1), np.full(len(columns), 3)),
    }
    group = np.prod([size for size, _ in often.values()], axis=0)
    meetings = layers * np.sum([np.where(size > 1, times, 0) for size, times in often.values()], axis=0)
    inside = passes * _of_groups(laws, compute_s, meetings, group, columns)
    # Below ZeRO 3 with the pieces of its gradients, and once for their norm.
    once = _of_groups(laws, passes * compute_s, pieces + 1, np.where(by_unit, 1, data), columns)
    found: dict[str, Array] = {}
    left = np.ones(len(columns), bool)
    for name, (size, _) in often.items():
        found[name] = np.where(left & (size > 1), inside, 0.0)
        left = left & (size <= 1)
    found["dp_exposed"] = found["dp_exposed"] + once
    return found


def _of_groups(laws: Laws, compute_s: Array, meetings: Array, group: Array, columns: Columns) -> Array:
    """What groups of so many ranks wait, by row."""
    result = np.zeros(len(columns))
    for size, ranks in {*zip(group.astype(int).tolist(), columns.world_size.astype(int).tolist(), strict=True)}:
        here = (group == size) & (columns.world_size == ranks)
        result[here] = laws.waiting(compute_s[here], meetings[here], group=size, active=ranks)
    return result
