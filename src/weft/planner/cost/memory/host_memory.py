"""Bytes that a rank keeps in its host's memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.shares import rank_shares, trained_shares
from weft.planner.space import Columns, Job

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostShares:
    """Parameters of the first rank of a pipeline that it steps, and all that it holds, ZeRO's division done; layers."""

    own: Array
    every: Array
    layers: Array

    def rows(self, index: NDArray[Any] | slice) -> HostShares:
        """Return the shares of plans, by the kind that each is of."""
        return HostShares(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


def is_offloaded(columns: Columns) -> bool:
    """Return whether any plan keeps anything in its host's memory."""
    return any(
        share[:1].any() if share.strides == (0,) else share.any()
        for share in (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    )


def host_shares(job: Job, columns: Columns, layers: Array) -> HostShares:
    """Return what the hosts keep if everything is offloaded, as numbers of parameters.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        layers: of the rank.
    """
    held = rank_shares(job, columns, layers, True, False)
    trained = trained_shares(job, columns, held, layers, (True, False))
    group = np.where(columns.zero >= 1, columns.dp_shard * columns.cp, 1)
    spread = columns.tp if job.stack.fold_experts else 1
    experts = np.where(columns.zero >= 1, np.maximum(1, columns.dp_shard * columns.cp * spread // columns.ep), 1)
    return HostShares(
        own=(trained.dense + trained.ends) / group + trained.experts / experts,
        every=(held.dense + held.ends) / group + held.experts / experts,
        layers=layers,
    )


def host_bytes(job: Job, columns: Columns, shares: HostShares, kept: Array, held: Array) -> Array:
    """Return the bytes that a rank of each plan keeps in its host's memory: states, weights and activations.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        shares: of the rank.
        kept: bytes of a pass's activations in a mean layer.
        held: passes in flight.
    """
    stack, optimizer, params = job.stack, columns.offload_optimizer, columns.offload_params
    states = optimizer * shares.own * (stack.main_bytes + stack.grad_bytes)
    weights = params * shares.every * stack.gather_bytes + params * (1 - optimizer) * shares.own * stack.main_bytes
    found = states + weights
    if columns.offload_activations.any():
        found = found + columns.offload_activations * shares.layers * held * kept
    return found
