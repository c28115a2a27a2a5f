"""Time of a step on a measured host: microbatches, pipeline, gradients, parameters and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.partitioning import bucket_bytes
from weft.config.plan import RECOMPUTES
from weft.planner.cost.recompute import budget_s, replay_s
from weft.planner.cost.shares import rank_shares
from weft.planner.cost.step import Parts
from weft.planner.measured.host_layer import (
    VALUE,
    ContendedLaws,
    HostContention,
    contention_of,
    dtype_of,
    layer_costs,
    waiting_s,
)
from weft.planner.measured.host_memory import host_memory
from weft.planner.measured.laws import Laws
from weft.planner.space import columns as wire_columns
from weft.planner.space.columns import Columns, Job

Array = NDArray[np.float64]
#: Rows and columns of the matrices that low-rank compression is modelled for, as in `config/wire_formats.py`.
_SIDE = 1024.0
#: Values that an optimizer with one moment reads and writes (weight, gradient, moment), relative to AdamW with two.
_OF_ONE_MEAN = 5 / 7


def data_parallel_s(
    job: Job, columns: Columns, clock: ContendedLaws, crowd: HostContention
) -> tuple[Array, Array, Array]:
    """Return the data-parallel time (s) of a step.

    The results are: communication over the data-parallel axes including copies; accumulation, norm, scaling and update;
    and the number of buckets in which gradients are communicated under ZeRO 0 to 2.

    Args:
        clock: fitted cost models with contention.
        crowd: contention of ranks for each plan.
    """
    held = _params(job, columns, crowd)
    dense, ends = _trained(job, columns, crowd, held)
    params = dense + ends
    shard = (columns.dp_shard * columns.cp).astype(float)
    # cp ranks reduce gradients too: without sharding they act as replicas.
    group = np.where(columns.zero > 0, shard, 1.0)
    replicas = columns.dp_replicate * np.where(columns.zero > 0, 1.0, shard)
    stride = columns.tp
    m = columns.num_micro.astype(float)
    pieces = np.maximum(1.0, np.ceil(params / (bucket_bytes("cpu") // 4)))
    sent = wire_columns.wire_bytes(columns, params, VALUE)
    reduce = pieces * clock.transfer_s("reduce_scatter", sent / pieces, group, stride)
    # At zero=0 the ranks of dp_shard are replicas too, and one collective reduces over both axes.
    alone = (columns.zero == 0) & (columns.compress == 0) & (columns.sync == 0)
    beside = wire_columns.replica_bytes(columns, params / group, VALUE)
    apart = np.where(alone, replicas, columns.dp_replicate)
    # A fragment of local SGD needs at least one call. Like all communication on a host it is exposed, because the same
    # cores compute and move data.
    calls = np.maximum(pieces, columns.sync_fragments)
    across = calls * clock.transfer_s("all_reduce", beside / calls, apart, stride * group)
    reduce = reduce + across / columns.sync_every
    within = np.where(alone | (columns.zero > 0), 1.0, shard)
    reduce = reduce + pieces * clock.transfer_s("all_reduce", sent / pieces, within, stride)
    reduce = reduce + _encoding(columns, clock, params, float(job.shape.hidden))
    whole = wire_columns.weight_bytes(columns, params, VALUE)
    gather = pieces * clock.transfer_s("all_gather", whole / pieces, group, stride)
    # Each rank encodes the differences of its shard, and decodes all shards.
    width = float(job.shape.hidden)
    coded = clock.of("copy", params * (1 + 1 / group) / width, width)
    flat = reduce + gather + np.where((columns.gather > 0) & (group > 1), coded, 0.0)
    travel = np.where(columns.zero == 3, _sharded(job, columns, clock, held, (dense, ends), m), flat)
    own = params / group
    added = np.where(columns.zero == 3, own, params)
    sums = (m - 1) * clock.of("add_to", added / job.shape.hidden, float(job.shape.hidden))
    return travel, sums + _update_s(job, clock, own, crowd.layers / group) + clock.of("clip", own), pieces


def _update_s(job: Job, clock: ContendedLaws, own: Array, layers: Array) -> Array:
    """Return the time (s) of the optimizer's update of `own` parameters, with Muon matrices of `layers` layers.

    AdamW was measured. SGD and Muon have one moment less, so they read and write 5 values per parameter instead of 7.
    """
    found = clock.of("adamw", own) * (1.0 if job.optimizer == "adamw" else _OF_ONE_MEAN)
    for *sizes, times in job.turning_products:
        found = found + times * layers * clock.of("linear_f", *(np.full(len(own), size) for size in sizes))
    return found


def _params(job: Job, columns: Columns, crowd: HostContention) -> tuple[Array, Array]:
    """Return the busiest rank's number of parameters (layers, embedding and head)."""
    inside = rank_shares(job, columns, crowd.layers, False, False)
    table = job.shape.vocab * job.shape.hidden / columns.tp.astype(float)
    both = crowd.has_embedding + crowd.has_head
    if job.shape.tied:
        both = np.minimum(both, 1.0)
    return inside.dense + inside.experts, table * both


def _trained(job: Job, columns: Columns, crowd: HostContention, held: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the number of trained parameters: all, an adapter's, or those whose optimizer group does not have lr=0."""
    part = job.trained
    if part is not None:
        return held[0] * part.layers, held[1] * part.of_ends(crowd.has_embedding, crowd.has_head)
    if job.adapter is None:
        return held
    return job.adapter.params_of_rank(crowd.layers, columns.tp.astype(float)), np.zeros(len(columns))


def _encoding(columns: Columns, clock: ContendedLaws, params: Array, width: float) -> Array:
    """Return the time (s) to encode and decode gradients, with one copy each, if a wire format encodes them."""
    encodes = (wire_columns.copy_bytes(columns, VALUE) > 0) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    plain = columns.reduce == 0  # only `compress` encodes: rare outer steps, and each replica rank's shard
    every = np.where(plain, columns.sync_every, 1)
    parts = np.where(plain & (columns.dp_replicate > 1) & (columns.zero > 0), columns.dp_shard * columns.cp, 1)
    values = np.where(encodes, 2 * clock.of("copy", params / parts / width, width) / every, 0.0)
    rank = wire_columns.low_rank(columns)
    if not rank.any():
        return values
    # Low rank: matmuls M Q, M^T P, P Q^T, and the residual of M. Over replicas each rank computes its shard.
    divided = (columns.dp_replicate > 1) & (columns.zero > 0)
    rows = params / np.where(divided, columns.dp_shard * columns.cp, 1) / _SIDE
    thin = np.maximum(rank, 1.0)
    products = 2 * clock.of("linear_f", rows, _SIDE, thin) + clock.of("linear_f", rows, thin, _SIDE)
    return values + np.where(encodes & (rank > 0), products + clock.of("add_to", rows, _SIDE), 0.0)


def _sharded(
    job: Job, columns: Columns, clock: ContendedLaws, held: tuple[Array, Array], trained: tuple[Array, Array], m: Array
) -> Array:
    """Return the time (s) per step of ZeRO-3 communication and its copies.

    For each microbatch, every unit is gathered for forward and for backward, and its gradients are reduce-scattered.
    `held` is (parameters of the layers, of embedding and head). `trained` is the same for trained parameters.
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
        # A gather copies into one buffer and from there to the parameters. A reduce-scatter copies gradients into one
        # buffer.
        moved = clock.of("copy", params / units / h, h)
        gather = clock.transfer_s("all_gather", each, group, stride) + moved
        # If encoded weights are gathered, each rank encodes its shard and decodes all shards.
        gather = gather + np.where(columns.gather > 0, clock.of("copy", params / units * (1 + 1 / group) / h, h), 0.0)
        # Backward gathers from secondary shards, if there are any, without encoding.
        near = (
            clock.transfer_s("all_gather", params / units * VALUE, np.maximum(1.0, columns.reshard_within), stride)
            + moved
        )
        both = gather + np.where(again == 2.0, np.where(columns.reshard_within > 0, near, gather), 0.0)
        sent = wire_columns.wire_bytes(columns, learnt / units, VALUE)
        reduce = clock.transfer_s("reduce_scatter", sent, group, stride)
        reduce = reduce + clock.of("copy", learnt / units / h, h)
        beside = wire_columns.replica_bytes(columns, learnt / units / group, VALUE)
        across = clock.transfer_s("all_reduce", beside, columns.dp_replicate, stride * group)
        reduce = reduce + np.where(columns.sync > 0, 0.0, across)
        total = total + np.where(columns.sync > 0, units * across / columns.sync_every, 0.0)
        encoding = _encoding(columns, clock, learnt / units, h)
        # Once per outer step of local SGD, independent of the format `reduce` in each microbatch.
        rarely = (columns.sync > 0) & (columns.reduce == 0)
        total = total + np.where(rarely, units * encoding, 0.0)
        reduce = reduce + np.where(rarely, 0.0, encoding)
        total = total + units * (both * np.where(once, 1.0, m) + reduce * np.where(once, 1.0, m))
    return total


# Step time of plans whose ranks share the cores of one measured host.

#: Terms that this model computes. The other terms of a step are zero on a host.
FILLED = (
    "gemm",
    "attention",
    "memory_bound",
    "recompute",
    "tp",
    "cp",
    "ep",
    "pp_p2p",
    "bubble",
    "dp_exposed",
    "optimizer",
)


def host_parts(job: Job, columns: Columns, laws: Laws) -> Parts:
    """Return time (s) by term and bytes by class for each plan, in the format of `cost.step.device_parts`."""
    return host_terms(job, columns, laws), host_memory(job, columns)


def host_terms(job: Job, columns: Columns, laws: Laws) -> dict[str, Array]:
    """Return the time (s) of a step by term (FILLED), for each plan."""
    terms = {name: np.zeros(len(columns)) for name in FILLED}
    for dtype, rows in dtype_of(columns):
        part = columns[rows]
        crowd = contention_of(job, part)
        for name, seconds in _terms(job, part, laws, dtype, crowd).items():
            terms[name][rows] = seconds
    return terms


@dataclass(frozen=True, slots=True)
class PassTerms:
    """Time (s) of one microbatch on the busiest rank, by term."""

    terms: dict[str, Array]

    @property
    def total(self) -> Array:
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def compute(self) -> Array:
        """Time (s) of compute, including recomputed communication but no other communication."""
        return np.sum([self.terms[name] for name in ("gemm", "attention", "memory_bound", "recompute")], axis=0)


def _terms(job: Job, columns: Columns, laws: Laws, dtype: str, crowd: HostContention) -> dict[str, Array]:
    m = columns.num_micro.astype(float)
    full = _pass(job, columns, crowd, laws, crowd.steady, dtype)
    terms = {name: m * seconds for name, seconds in full.terms.items()}
    terms["bubble"], terms["pp_p2p"] = np.zeros(len(columns)), np.zeros(len(columns))
    piped = columns.pp > 1
    if piped.any():
        bubble, sends = _pipeline(job, columns[piped], laws, dtype, crowd.rows(piped), full.total[piped])
        terms["bubble"][piped], terms["pp_p2p"][piped] = bubble, sends
    clock = ContendedLaws(laws, columns.world_size.astype(float), dtype)
    terms["dp_exposed"], terms["optimizer"], pieces = data_parallel_s(job, columns, clock, crowd)
    for name, seconds in waiting_s(job, columns, clock, crowd.layers, m * full.compute, pieces).items():
        terms[name] = terms[name] + seconds
    return terms


def _pass(job: Job, columns: Columns, crowd: HostContention, laws: Laws, active: Array, dtype: str) -> PassTerms:
    """Return the time (s) of one microbatch on the busiest rank, forward and backward, including recompute."""
    layers, costs = crowd.layers, layer_costs(job, columns, laws, active, dtype)
    repeated = budget_s(job, columns, costs)
    for name, seconds in replay_s(job, columns, costs).items():
        repeated = np.where(columns.recompute == RECOMPUTES.index(name), seconds, repeated)
    embed, head = crowd.has_embedding, crowd.has_head
    return PassTerms({
        "gemm": layers * (costs.gemm_f + costs.gemm_b) + head * costs.head_gemm,
        "attention": layers * (costs.attn_f + costs.attn_b),
        "memory_bound": layers * (costs.memory_f + costs.memory_b) + embed * costs.embed + head * costs.head_memory,
        "recompute": layers * repeated * columns.recompute_share,
        "tp": layers * (costs.tp_f + costs.tp_b) + embed * costs.embed_tp + head * costs.head_tp,
        "cp": layers * (costs.cp_f + costs.cp_b),
        "ep": layers * (costs.ep_f + costs.ep_b),
    })  # fmt: skip


def _pipeline(
    job: Job, columns: Columns, laws: Laws, dtype: str, crowd: HostContention, full: Array
) -> tuple[Array, Array]:
    """Return the time (s) of filling and draining beyond the busiest rank's microbatches, and the time (s) of messages.

    While some stages are active, a microbatch takes the time that the cost models give for this number of active ranks.
    Each number of stages below the maximum occurs twice, once in filling and once in draining. In half of these slots
    the busiest rank waits.
    """
    p, m = columns.pp.astype(float), columns.num_micro.astype(float)
    share = crowd.bubble_share
    slots = np.zeros(len(columns))
    for stages in range(1, int(p.max())):
        met = np.minimum(stages, m)
        active = np.maximum(1.0, met * crowd.steady / p)
        each = _pass(job, columns, crowd, laws, active, dtype).total
        slots = slots + np.where(stages < p, 2 * each, 0.0)
    # (p - 1) microbatches of the busiest rank run during filling and draining, at the speed of that time.
    bubble = share * (slots - (p - 1) * full)
    clock = ContendedLaws(laws, crowd.steady, dtype)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    size = tokens * job.shape.crossings * job.shape.hidden * VALUE / np.where(columns.sp, columns.tp, 1)
    each = clock.transfer_s("send", size, np.full(len(columns), 2))
    return bubble, each * crowd.sends
