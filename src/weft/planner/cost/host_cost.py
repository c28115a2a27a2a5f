"""What the host does for a rank: seconds of transfers, and the optimizer's step there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.machine import Tables
from weft.planner.space import Columns, Job
from weft.spec.plan import RESHARDS

Array = NDArray[np.float64]

#: Bytes per parameter that an Adam step moves there (g, p, m and v read; p, m and v written).
_HOST_STEP_BYTES = 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What goes on beside the transfers: seconds of one pass of one layer, layers of a rank, its own parameters.

    kept: bytes of a pass's activations in a mean layer.
    """

    forward: Array
    backward: Array
    layers: Array
    own: Array
    kept: Array


def offload_s(job: Job, columns: Columns, tables: Tables, work: LayerWork, devices_per_node: int) -> Array:
    """Seconds of a step that the host adds: what does not hide under compute, and the optimizer's step on the host.

    Transfers run beside compute, out in forward and in during backward (Ren et al. 2021, arXiv 2101.06840); of each
    layer only what is longer than its compute is waited for.
    """
    shares = (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    if not any(share.any() for share in shares):
        return np.zeros(len(columns))
    optimizer, params, activations = shares
    rate, passes = tables.host_rate, columns.num_micro.astype(np.float64)
    whole_s = passes * work.layers * (work.forward + work.backward)
    stepped = np.maximum(optimizer, params) * work.own
    step = stepped * (_HOST_STEP_BYTES * devices_per_node / tables.host_step_rate)
    out = optimizer * work.own * job.stack.grad_bytes / rate
    back = optimizer * work.own * job.stack.weight_bytes / rate
    sums = np.where(columns.reduces_once, 1.0, passes)
    gathers = np.where(columns.reshard == RESHARDS.index("after_forward"), 2 * passes, sums)
    moved = params * work.own * (gathers * job.stack.gather_bytes + sums * job.stack.grad_bytes) / rate
    late = np.maximum(0.0, out + moved - whole_s * (2 / 3))
    each = activations * work.kept / rate
    waits = np.maximum(0.0, each - work.forward) + np.maximum(0.0, each - work.backward)
    return step + back + late + passes * work.layers * waits
