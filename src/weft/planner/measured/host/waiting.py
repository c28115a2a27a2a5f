"""What ranks of a host wait for each other, besides what a collective takes.

Who comes to a meeting late is chance: the longer ranks compute before it, the longer the others wait, and the more so
where they share cores. Measured as `meeting` (calibrate/traffic.py). Not counted: meetings of a pipeline's stages, and
those in layers that a memory budget makes again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.measured.host.host_layer import CrowdedLaws
from weft.planner.space import Columns, Job
from weft.spec.plan import RECOMPUTES, RESHARDS

Array = NDArray[np.float64]

#: How often the ranks of ZeRO 3 meet for one layer's parameters and gradients, by `reshard`.
_GATHERS = {"after_forward": 3, "after_backward": 2, "after_step": 2}


def waiting_s(
    job: Job, columns: Columns, clock: CrowdedLaws, layers: Array, compute_s: Array, pieces: Array
) -> dict[str, Array]:
    """Seconds of a step by the term that they lengthen.

    layers: of the busiest rank. compute_s: of a whole step. pieces: in which gradients travel below ZeRO 3. Between two
    meetings of whatever axis lies as much compute as between any other two: an approximation.
    """
    often = _meetings(job, columns, layers, pieces)
    between = np.sum([np.where(size > 1, times, 0.0) for size, times in often.values()], axis=0)
    between = compute_s / np.maximum(1.0, between)
    return {name: times * clock.waiting(between, size) for name, (size, times) in often.items()}


def _meetings(job: Job, columns: Columns, layers: Array, pieces: Array) -> dict[str, tuple[NDArray[np.int64], Array]]:
    """By term: the ranks that meet, and how often in a step."""
    full = columns.recompute == RECOMPUTES.index("full")
    selective = columns.recompute == RECOMPUTES.index("selective")
    passes = columns.num_micro.astype(float)
    every = layers * passes
    shard = columns.dp_shard * columns.cp
    by_unit = columns.zero == 3
    gathers = np.select([columns.reshard == RESHARDS.index(name) for name in _GATHERS], list(_GATHERS.values()))
    once = columns.reduces_once
    # Attention and feed-forward, each forward and backward; of what is made again the first of two sums.
    tp = every * (4 + columns.recompute_share * (full | selective))
    cp = every * (2 + columns.recompute_share * full)
    ep = every * 4 * job.shape.moe_layers / job.shape.layers
    units = gathers * np.where(once, layers, every)
    # Replicas that train by themselves wait for each other at rare meetings, and each step for its five numbers.
    pieces = np.where((columns.sync > 0) & (shard == 1), pieces / columns.sync_every, pieces)
    # And once for the norm of all gradients.
    data = 1 + np.where(by_unit, units, pieces)
    return {
        "tp": (columns.tp, tp),
        "cp": (columns.cp, cp),
        "ep": (columns.ep, ep),
        "dp_exposed": (np.where(by_unit, shard, columns.dp_replicate * shard), data),
    }
