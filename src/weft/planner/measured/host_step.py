"""Seconds of gradients, parameters and the optimizer's step on a measured host, by ZeRO stage."""

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
#: Rows and columns of the matrices that low rank is thought of, as `spec/wires.py` does.
_SIDE = 1024.0
#: Values that an optimizer with one mean reads and writes (weight, gradient, mean), over those of AdamW with two.
_OF_ONE_MEAN = 5 / 7


def data_parallel_s(
    job: Job, columns: Columns, clock: ContendedLaws, crowd: HostContention
) -> tuple[Array, Array, Array]:
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
    reduce = pieces * clock.transfer_s("reduce_scatter", sent / pieces, group, stride)
    # At zero=0 the ranks of dp_shard are replicas too, and one collective serves both.
    alone = (columns.zero == 0) & (columns.compress == 0) & (columns.sync == 0)
    beside = wire_columns.replica_bytes(columns, params / group, VALUE)
    apart = np.where(alone, replicas, columns.dp_replicate)
    # A fragment of replicas that meet rarely is a call of its own, at least. It travels in the open as all does on a
    # host: the cores that would hide it are those that move it.
    calls = np.maximum(pieces, columns.sync_fragments)
    across = calls * clock.transfer_s("all_reduce", beside / calls, apart, stride * group)
    reduce = reduce + across / columns.sync_every
    within = np.where(alone | (columns.zero > 0), 1.0, shard)
    reduce = reduce + pieces * clock.transfer_s("all_reduce", sent / pieces, within, stride)
    reduce = reduce + _encoding(columns, clock, params, float(job.shape.hidden))
    whole = wire_columns.weight_bytes(columns, params, VALUE)
    gather = pieces * clock.transfer_s("all_gather", whole / pieces, group, stride)
    # Each rank encodes the differences of its part, and decodes those of all.
    width = float(job.shape.hidden)
    coded = clock.of("copy", params * (1 + 1 / group) / width, width)
    flat = reduce + gather + np.where((columns.gather > 0) & (group > 1), coded, 0.0)
    travel = np.where(columns.zero == 3, _sharded(job, columns, clock, held, (dense, ends), m), flat)
    own = params / group
    added = np.where(columns.zero == 3, own, params)
    sums = (m - 1) * clock.of("add_to", added / job.shape.hidden, float(job.shape.hidden))
    return travel, sums + _update_s(job, clock, own, crowd.layers / group) + clock.of("clip", own), pieces


def _update_s(job: Job, clock: ContendedLaws, own: Array, layers: Array) -> Array:
    """Seconds of the optimizer's update of `own` parameters; layers: those whose matrices a rank orthogonalises.

    AdamW was measured. SGD and Muon keep one mean less, so they read and write 5 values a parameter in place of 7.
    """
    found = clock.of("adamw", own) * (1.0 if job.optimizer == "adamw" else _OF_ONE_MEAN)
    for *sizes, times in job.turning_products:
        found = found + times * layers * clock.of("linear_f", *(np.full(len(own), size) for size in sizes))
    return found


def _params(job: Job, columns: Columns, crowd: HostContention) -> tuple[Array, Array]:
    """Parameters of the busiest rank: of its layers, and of embedding and head."""
    inside = rank_shares(job, columns, crowd.layers, False, False)
    table = job.shape.vocab * job.shape.hidden / columns.tp.astype(float)
    both = crowd.has_embedding + crowd.has_head
    if job.shape.tied:
        both = np.minimum(both, 1.0)
    return inside.dense + inside.experts, table * both


def _trained(job: Job, columns: Columns, crowd: HostContention, held: tuple[Array, Array]) -> tuple[Array, Array]:
    """Which of them are trained: all, an adapter's, or those whose group has no lr=0."""
    part = job.trained
    if part is not None:
        return held[0] * part.layers, held[1] * part.of_ends(crowd.has_embedding, crowd.has_head)
    if job.adapter is None:
        return held
    return job.adapter.params_of_rank(crowd.layers, columns.tp.astype(float)), np.zeros(len(columns))


def _encoding(columns: Columns, clock: ContendedLaws, params: Array, width: float) -> Array:
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
    job: Job, columns: Columns, clock: ContendedLaws, held: tuple[Array, Array], trained: tuple[Array, Array], m: Array
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
        gather = clock.transfer_s("all_gather", each, group, stride) + moved
        # Of what is gathered as codes each rank encodes its part and decodes all.
        gather = gather + np.where(columns.gather > 0, clock.of("copy", params / units * (1 + 1 / group) / h, h), 0.0)
        # Backward gathers from second shards as they are, where there are some.
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
        # Once in a meeting of replicas that meet rarely, whatever `reduce` does in each microbatch.
        rarely = (columns.sync > 0) & (columns.reduce == 0)
        total = total + np.where(rarely, units * encoding, 0.0)
        reduce = reduce + np.where(rarely, 0.0, encoding)
        total = total + units * (both * np.where(once, 1.0, m) + reduce * np.where(once, 1.0, m))
    return total


# Step time of plans whose ranks share the cores of one measured host.

#: The terms that this model fills; the others of a step are zero on a host.
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
    """Return seconds by term and bytes by class of every row, as `cost.device_parts` has them for devices.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        laws: of the host's primitives.
    """
    return host_terms(job, columns, laws), host_memory(job, columns)


def host_terms(job: Job, columns: Columns, laws: Laws) -> dict[str, Array]:
    """Seconds of a step by term, FILLED, for every row."""
    terms = {name: np.zeros(len(columns)) for name in FILLED}
    for dtype, rows in dtype_of(columns):
        part = columns[rows]
        crowd = contention_of(job, part)
        for name, seconds in _terms(job, part, laws, dtype, crowd).items():
            terms[name][rows] = seconds
    return terms


@dataclass(frozen=True, slots=True)
class PassTerms:
    """Seconds of one microbatch on the busiest rank, by term."""

    terms: dict[str, Array]

    @property
    def total(self) -> Array:
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def compute(self) -> Array:
        """Without what travels, but for that of what is made again."""
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
    """One microbatch on the busiest rank, forward and backward, with what recompute does again."""
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
    """Seconds that filling and draining cost beyond the busiest rank's own passes, and those of messages.

    While `stages` of them are at work, a pass takes what the laws say for so many ranks at once. Each number of stages
    below all is met twice, once filling and once draining; in half of these slots the busiest rank waits.
    """
    p, m = columns.pp.astype(float), columns.num_micro.astype(float)
    share = crowd.bubble_share
    slots = np.zeros(len(columns))
    for stages in range(1, int(p.max())):
        met = np.minimum(stages, m)
        active = np.maximum(1.0, met * crowd.steady / p)
        each = _pass(job, columns, crowd, laws, active, dtype).total
        slots = slots + np.where(stages < p, 2 * each, 0.0)
    # (p - 1) passes of the busiest rank lie within filling and draining, at the pace of those.
    bubble = share * (slots - (p - 1) * full)
    clock = ContendedLaws(laws, crowd.steady, dtype)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    size = tokens * job.shape.crossings * job.shape.hidden * VALUE / np.where(columns.sp, columns.tp, 1)
    each = clock.transfer_s("send", size, np.full(len(columns), 2))
    return bubble, each * crowd.sends
