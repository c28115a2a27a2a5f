"""Number of parameters on one rank: stored, trained, and as values in another format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.layer import padded_vocab
from weft.planner.cost.traced import end_params, layer_params
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import TracedShape
from weft.planner.space.trained_part import BLOCK, BLOCK_BYTES

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """Number of parameters of one rank: dense parameters of its layers, experts, and ends (embedding and head)."""

    dense: Array
    experts: Array
    ends: Array


def rank_shares(job: Job, columns: Columns, layers: Array, embedding: bool, head: bool) -> Shares:
    """Return the number of parameters of a rank."""
    shape = job.shape
    t, e = columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    moe = shape.moe_share
    dense = (1 - moe) * shape.dense_layer_params
    if shape.moe_layers:
        dense = dense + moe * shape.moe_shared_params
    experts = layers * moe * shape.num_experts * shape.expert_params / e
    if isinstance(shape, TracedShape):
        dense = layer_params(shape, t) * t
    table = padded_vocab(job, t) * shape.hidden
    alone = np.where(columns.pp > 1, 1.0, 0.0)  # a tied head on another stage has its own copy
    ends = np.zeros(len(columns))
    if embedding:
        ends = ends + table + shape.learned_positions * shape.hidden
    if head:
        ends = ends + table * (1.0 if not shape.tied else (alone if embedding is False else 0.0))
    ends = ends / t
    if isinstance(shape, TracedShape):
        ends = ends + embedding * end_params(shape.traced.before, t) + head * end_params(shape.traced.after, t)
    else:
        ends = ends + (shape.hidden * (2 if shape.biases else 1) if head else 0)  # last norm, replicated
    return Shares(dense=layers * dense / t, experts=experts, ends=ends)


def trained_shares(
    job: Job, columns: Columns, shares: Shares, layers: Array, ends: tuple[bool, bool | NDArray[np.bool_]]
) -> Shares:
    """Return the number of trained parameters of a rank: all, an adapter's, or those without lr=0.

    Args:
        shares: all parameters of the rank.
        ends: whether the rank has the embedding, and whether it has the head.
    """
    part = job.trained
    if job.adapter is None:
        if part is None:
            return shares
        inside = np.where(columns.pp > 1, part.most, part.layers)  # a stage may have any of the layers
        experts = shares.experts * part.experts
        return Shares(dense=shares.dense * inside, experts=experts, ends=shares.ends * part.of_ends(*ends))
    none = np.zeros(len(columns))
    held = job.adapter.params_of_rank(layers, columns.tp.astype(np.float64))
    return Shares(dense=held, experts=none, ends=none)


def shares_in_format(job: Job, columns: Columns, shares: Shares, layers: Array, width: Array | float) -> Shares:
    """Return a rank's parameters as the number of `width`-byte values with the same total bytes.

    It differs from the number of parameters only for a quantized base, whose parameters use fewer bytes.
    """
    adapter = job.adapter
    if adapter is None or adapter.base not in BLOCK_BYTES:
        return shares
    shares = replace(shares, experts=shares.experts * (BLOCK_BYTES[adapter.base] / BLOCK) / width)
    if not adapter.packed:
        return shares
    each = layers / columns.tp.astype(np.float64)
    packed = np.minimum(shares.dense, each * adapter.packed)
    return replace(shares, dense=shares.dense - packed + packed * (adapter.packed_bytes / adapter.packed) / width)


def zero_groups(columns: Columns, stage: int) -> tuple[Array, Array]:
    """Return the numbers of ranks that shard dense parameters and experts; 1 for plans with zero below `stage`.

    With `shard_shares`, the first is all states over those of the rank with the largest share.
    """
    group = columns.dp_shard * columns.cp / columns.largest_shard
    inside = np.maximum(1.0, group * columns.tp / columns.ep)
    return np.where(columns.zero >= stage, group, 1.0), np.where(columns.zero >= stage, inside, 1.0)


def divided(columns: Columns, shares: Shares, stage: int) -> Array:
    """Return the number of parameters on a rank, sharded as in `zero_groups`."""
    group, inside = zero_groups(columns, stage)
    return (shares.dense + shares.ends) / group + shares.experts / inside


def second_job(job: Job) -> Job | None:
    """Return a job for the second, frozen model on the same sequences, or None without one."""
    if job.frozen is None or job.frozen.shape is None:
        return None
    return replace(job, shape=job.frozen.shape, adapter=None, frozen=None)


def second_shares(job: Job, columns: Columns, layers: Array, embedding: bool, head: bool) -> Shares | None:
    """Return the number of parameters of the second model on a rank, or None without a second model."""
    second = second_job(job)
    if second is None:
        return None
    return rank_shares(second, columns, layers * (second.shape.layers / job.shape.layers), embedding, head)
