"""Bytes that a rank keeps in its host's memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.memory_cost import layer_bytes, rank_shares, trained_shares
from weft.planner.cost.pipeline import Stages, in_flight
from weft.planner.space import Columns, Job

Array = NDArray[np.float64]


def host_bytes(job: Job, columns: Columns, stages: Stages) -> Array:
    """Return the bytes that a rank of each plan keeps in its host's memory: states, weights and activations.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        stages: layers of the ranks.
    """
    shares = (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    if not any(share.any() for share in shares):
        return np.zeros(len(columns))
    optimizer, params, activations = shares
    layers = np.where(columns.pp > 1, stages.first, stages.middle)
    held = rank_shares(job, columns, layers, True, False)
    trained = trained_shares(job, columns, held, layers)
    group = np.where(columns.zero >= 1, columns.dp_shard * columns.cp, 1)
    spread = columns.tp if job.stack.fold_experts else 1
    experts = np.where(columns.zero >= 1, np.maximum(1, columns.dp_shard * columns.cp * spread // columns.ep), 1)
    own = (trained.dense + trained.ends) / group + trained.experts / experts
    every = (held.dense + held.ends) / group + held.experts / experts
    states = optimizer * own * (job.stack.main_bytes + job.stack.grad_bytes)
    weights = params * every * job.stack.gather_bytes + params * (1 - optimizer) * own * job.stack.main_bytes
    saved = activations * layers * in_flight(columns, 0) * layer_bytes(job, columns).kept
    return states + weights + saved
