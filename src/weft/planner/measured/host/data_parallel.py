"""Seconds of gradients, parameters and the optimizer's step on a measured host, by ZeRO stage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import rank_shares
from weft.planner.measured.host.crowd import Crowd
from weft.planner.measured.host.host_layer import VALUE, CrowdedLaws
from weft.planner.space import Columns, Job, wire_columns
from weft.spec.shares import bucket_bytes

Array = NDArray[np.float64]
#: Rows and columns of the matrices that low rank is thought of, as `spec/wires.py` does.
_SIDE = 1024.0
#: Values that an optimizer with one mean reads and writes (weight, gradient, mean), over those of AdamW with two.
_OF_ONE_MEAN = 5 / 7


def data_parallel_s(job: Job, columns: Columns, clock: CrowdedLaws, crowd: Crowd) -> tuple[Array, Array, Array]:
    """Of a step: what travels over the data-parallel axes, with its copies; and sums, norm, scaling and update.

    Last, in how many pieces gradients travel under ZeRO 0 to 2.
    """
    held = _params(job, columns, crowd)
    dense, ends = _trained(job, columns, crowd, held)
    params = dense + ends
    shard = (columns.dp_shard * columns.cp).astype(float)
    # cp ranks add up gradients too: without sharding they are replicas.
    group = np.where(columns.zero > 0, shard, 1.0)
    replicas = columns.dp_replicate * np.where(columns.zero > 0, 1.0, shard)
    stride = columns.tp
    m = columns.num_micro.astype(float)
    pieces = np.maximum(1.0, np.ceil(params / (bucket_bytes("cpu") // 4)))
    sent = wire_columns.wire_bytes(columns, params, VALUE)
    reduce = pieces * clock.travel("reduce_scatter", sent / pieces, group, stride)
    # At zero=0 the ranks of dp_shard are replicas too, and one collective serves both.
    alone = (columns.zero == 0) & (columns.compress == 0) & (columns.sync == 0)
    beside = wire_columns.replica_bytes(columns, params / group, VALUE)
    apart = np.where(alone, replicas, columns.dp_replicate)
    # A fragment of replicas that meet rarely is a call of its own, at least. It travels in the open as all does on a
    # host: the cores that would hide it are those that move it.
    calls = np.maximum(pieces, columns.sync_fragments)
    across = calls * clock.travel("all_reduce", beside / calls, apart, stride * group)
    reduce = reduce + across / columns.sync_every
    within = np.where(alone | (columns.zero > 0), 1.0, shard)
    reduce = reduce + pieces * clock.travel("all_reduce", sent / pieces, within, stride)
    reduce = reduce + _encoding(columns, clock, params, float(job.shape.hidden))
    whole = wire_columns.weight_bytes(columns, params, VALUE)
    gather = pieces * clock.travel("all_gather", whole / pieces, group, stride)
    # Each rank encodes the differences of its part, and decodes those of all.
    width = float(job.shape.hidden)
    coded = clock.of("copy", params * (1 + 1 / group) / width, width)
    flat = reduce + gather + np.where((columns.gather > 0) & (group > 1), coded, 0.0)
    travel = np.where(columns.zero == 3, _sharded(job, columns, clock, held, (dense, ends), m), flat)
    own = params / group
    added = np.where(columns.zero == 3, own, params)
    sums = (m - 1) * clock.of("add_to", added / job.shape.hidden, float(job.shape.hidden))
    return travel, sums + _update_s(job, clock, own, crowd.layers / group) + clock.of("clip", own), pieces


def _update_s(job: Job, clock: CrowdedLaws, own: Array, layers: Array) -> Array:
    """Seconds of the optimizer's update of `own` parameters; layers: those whose matrices a rank orthogonalises.

    AdamW was measured. SGD and Muon keep one mean less, so they read and write 5 values a parameter in place of 7.
    """
    found = clock.of("adamw", own) * (1.0 if job.optimizer == "adamw" else _OF_ONE_MEAN)
    for *sizes, times in job.turning_products:
        found = found + times * layers * clock.of("linear_f", *(np.full(len(own), size) for size in sizes))
    return found


def _params(job: Job, columns: Columns, crowd: Crowd) -> tuple[Array, Array]:
    """Parameters of the busiest rank: of its layers, and of embedding and head."""
    inside = rank_shares(job, columns, crowd.layers, False, False)
    table = job.shape.vocab * job.shape.hidden / columns.tp.astype(float)
    both = crowd.has_embedding + crowd.has_head
    if job.shape.tied:
        both = np.minimum(both, 1.0)
    return inside.dense + inside.experts, table * both


def _trained(job: Job, columns: Columns, crowd: Crowd, held: tuple[Array, Array]) -> tuple[Array, Array]:
    """Which of them are trained: all, an adapter's, or those whose group has no lr=0."""
    part = job.trained
    if part is not None:
        return held[0] * part.layers, held[1] * part.of_ends(crowd.has_embedding, crowd.has_head)
    if job.adapter is None:
        return held
    return job.adapter.params_of_rank(crowd.layers, columns.tp.astype(float)), np.zeros(len(columns))


def _encoding(columns: Columns, clock: CrowdedLaws, params: Array, width: float) -> Array:
    """Gradients into what travels and back: a copy each, where a wire encodes them and somebody is there to send to."""
    encodes = (wire_columns.copy_bytes(columns, VALUE) > 0) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    plain = columns.reduce == 0  # `compress` alone encodes: what meets rarely, and of replicas each rank's part
    every = np.where(plain, columns.sync_every, 1)
    parts = np.where(plain & (columns.dp_replicate > 1) & (columns.zero > 0), columns.dp_shard * columns.cp, 1)
    values = np.where(encodes, 2 * clock.of("copy", params / parts / width, width) / every, 0.0)
    rank = wire_columns.low_rank(columns)
    if not rank.any():
        return values
    # Of low rank: M Q and M^T P, P Q^T, and what is left of M. Over replicas each rank has its part of the sums.
    divided = (columns.dp_replicate > 1) & (columns.zero > 0)
    rows = params / np.where(divided, columns.dp_shard * columns.cp, 1) / _SIDE
    thin = np.maximum(rank, 1.0)
    products = 2 * clock.of("linear_f", rows, _SIDE, thin) + clock.of("linear_f", rows, thin, _SIDE)
    return values + np.where(encodes & (rank > 0), products + clock.of("add_to", rows, _SIDE), 0.0)


def _sharded(
    job: Job, columns: Columns, clock: CrowdedLaws, held: tuple[Array, Array], trained: tuple[Array, Array], m: Array
) -> Array:
    """ZeRO 3: units are gathered for forward and again for backward, and their gradients scattered, in every pass.

    held: parameters of the layers and of the ends. trained: those that have gradients.
    """
    group = (columns.dp_shard * columns.cp).astype(float)
    stride = columns.tp
    once = columns.reduces_once
    again = np.where(columns.reshard == 0, 2.0, 1.0)
    h = float(job.shape.hidden)
    total = np.zeros(len(columns))
    layers = float(job.shape.layers) / columns.pp
    for params, learnt, units, in_layers in zip(held, trained, (layers, 2.0), (True, False), strict=True):
        each = wire_columns.weight_bytes(columns, params / units, VALUE, in_layers=in_layers)
        # Gathered: into one buffer, and out of it to the parameters; scattered: out of them into one.
        moved = clock.of("copy", params / units / h, h)
        gather = clock.travel("all_gather", each, group, stride) + moved
        # Of what is gathered as codes each rank encodes its part and decodes all.
        gather = gather + np.where(columns.gather > 0, clock.of("copy", params / units * (1 + 1 / group) / h, h), 0.0)
        # Backward gathers from second shards as they are, where there are some.
        near = (
            clock.travel("all_gather", params / units * VALUE, np.maximum(1.0, columns.reshard_within), stride) + moved
        )
        both = gather + np.where(again == 2.0, np.where(columns.reshard_within > 0, near, gather), 0.0)
        sent = wire_columns.wire_bytes(columns, learnt / units, VALUE)
        reduce = clock.travel("reduce_scatter", sent, group, stride)
        reduce = reduce + clock.of("copy", learnt / units / h, h)
        beside = wire_columns.replica_bytes(columns, learnt / units / group, VALUE)
        across = clock.travel("all_reduce", beside, columns.dp_replicate, stride * group)
        reduce = reduce + np.where(columns.sync > 0, 0.0, across)
        total = total + np.where(columns.sync > 0, units * across / columns.sync_every, 0.0)
        encoding = _encoding(columns, clock, learnt / units, h)
        # Once in a meeting of replicas that meet rarely, whatever `reduce` does in each microbatch.
        rarely = (columns.sync > 0) & (columns.reduce == 0)
        total = total + np.where(rarely, units * encoding, 0.0)
        reduce = reduce + np.where(rarely, 0.0, encoding)
        total = total + units * (both * np.where(once, 1.0, m) + reduce * np.where(once, 1.0, m))
    return total
