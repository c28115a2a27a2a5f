"""Speeds of devices from products of matrices, for scripts, which have no model yet when the plan is made."""

from __future__ import annotations

import time

import torch

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.config.partitioning import fastest_shares
from weft.devices import access

#: Sizes of the square matrices, on a CPU and on other devices.
_SIZE, _LARGE = 384, 4096
#: Seconds of the products of one trial, and number of trials.
_TRIAL_S, _TRIALS = 0.04, 3
#: Samples per rank that are divided by speed, so that differences below about 6 % are ignored.
_RESOLUTION = 8


def probed_shares(mesh: Mesh) -> tuple[int, ...]:
    """Return shares of the data ranks from the times of products on each device. They are equal on all ranks.

    All ranks call it. A data rank is as fast as the slowest of the ranks that share its samples.
    """
    seconds = torch.zeros(mesh.data.size, dtype=torch.float64, device=mesh.device)
    seconds[mesh.data.rank] = _seconds_per_product(mesh.device)
    slowest = all_reduce(seconds, mesh.world, op="max").tolist()
    return fastest_shares(_RESOLUTION * mesh.data.size, [1.0 / one for one in slowest])


def _seconds_per_product(device: torch.device) -> float:
    size = _SIZE if device.type == "cpu" else _LARGE
    left = torch.ones(size, size, device=device)
    found: list[float] = []
    for _ in range(_TRIALS + 1):
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < _TRIAL_S or not count:
            torch.mm(left, left)
            access.synchronize(device)
            count += 1
        found.append(spent / count)
    return max(1e-9, min(found[1:]))
