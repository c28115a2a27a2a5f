"""Time (s) of an optimizer step by term, for many plans in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import ClusterSpec
from weft.config.plan import RECOMPUTES
from weft.planner.cost.layer import LayerCosts, distinct_costs, layer_costs, of_costs
from weft.planner.cost.machine import Fabric, Tables, bytes_s, gemm_s
from weft.planner.cost.memory_terms import is_offloaded, layer_bytes
from weft.planner.cost.pipeline import (
    Stages,
    bubble_s,
    chunks_per_rank,
    even_layers,
    hidden_sends,
    sends,
    split_layers,
)
from weft.planner.cost.recompute import budget_s, replay_s, tiles_s
from weft.planner.cost.row_dedupe import RowDeduplicator, taken
from weft.planner.cost.shares import (
    Shares,
    divided,
    rank_shares,
    second_job,
    shares_in_format,
    trained_shares,
    zero_groups,
)
from weft.planner.cost.traffic import (
    OF_TRAFFIC,
    RankTraffic,
    Window,
    exposed_s,
    gathered_s,
    offload_s,
    traffic_of,
)
from weft.planner.space.columns import Columns, Job

Array = NDArray[np.float64]

#: The terms of a step, in display order.
TERMS = ("gemm", "attention", "memory_bound", "host", "recompute", "frozen", "tp", "cp", "ep", "pp_p2p", "bubble",
         "dp_exposed", "contention", "optimizer", "offload", "straggler")  # fmt: skip
#: Bytes that an AdamW step moves per parameter.
ADAM_BYTES = 30.0
#: Host time of a layer's backward relative to its forward.
_HOST_BACKWARD = 1.3
#: Plans per chunk of computation, so that their columns stay in the processor's cache.
_CHUNK = 1 << 14
#: Plans per call that finds their distinct kinds.
_AT_ONCE = 1 << 17
#: The columns that decide the terms of a layer in addition to its costs.
_OF_TERMS = ("recompute", "recompute_share", "activation_budget", "mlp_tiles")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Time (s) of one microbatch in an average layer and in embedding and head, with one entry per distinct row.

    Attributes:
        layer, head, embed: time by term.
        lay, top, bottom: sums over the terms of layer, head and embed.
        computes: forward of a layer without waiting for the host.
        forward, backward: time of a layer, including waiting for the host.
        kept: bytes of activations that a layer saves under the plan's recompute policy.
    """

    costs: LayerCosts
    layer: dict[str, Array]
    head: dict[str, Array]
    embed: dict[str, Array]
    lay: Array
    top: Array
    bottom: Array
    computes: Array
    forward: Array
    backward: Array
    kept: Array

    @classmethod
    def of(cls, job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> _Layer:
        costs = distinct_costs(job, columns, tables, fabric)
        idle_f, idle_b, layer = _layer_terms(job, columns, costs)
        layer["recompute"] = layer["recompute"] + budget_s(job, columns, costs)
        head = {"gemm": costs.head_gemm, "memory_bound": costs.head_memory, "tp": costs.head_tp}
        embed = {"memory_bound": costs.embed, "tp": costs.embed_tp}
        lay, top, bottom = (np.sum(list(each.values()), axis=0) for each in (layer, head, embed))
        computes = costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f
        backward = costs.gemm_b + costs.attn_b + costs.memory_b + costs.tp_b + idle_b + layer["recompute"]
        kept = layer_bytes(job, columns).kept
        return cls(costs, layer, head, embed, lay, top, bottom, computes, computes + idle_f, backward, kept)


@dataclass(frozen=True, slots=True)
class _Rank:
    """State and communication of a rank, with one entry per distinct row.

    Attributes:
        stages: number of layers of the first, a middle and the last pipeline rank.
        own: parameters that the rank's optimizer updates.
        every: all parameters, sharded like `own`, in the format in which they are gathered.
        each_sum: time (s) to accumulate a microbatch's gradients.
        optimizer: time (s) of the optimizer step.
        spread: slowdown of the slowest device relative to the average, in standard deviations.
    """

    stages: Stages
    traffic: RankTraffic
    own: Array
    every: Array
    each_sum: Array
    optimizer: Array
    spread: Array

    @classmethod
    def of(
        cls, job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, fabric: Fabric,
        stages: Stages, chunks: Array,
    ) -> _Rank:  # fmt: skip
        first = rank_shares(job, columns, stages.first, True, False)
        both = rank_shares(job, columns, stages.middle, True, True)
        alone = columns.pp == 1
        shares = Shares(
            dense=np.where(alone, both.dense, first.dense),
            experts=np.where(alone, both.experts, first.experts),
            ends=np.where(alone, both.ends, first.ends),
        )
        layers = np.where(alone, stages.middle, stages.first)
        trained = trained_shares(job, columns, shares, layers, (True, alone))
        moved = shares_in_format(job, columns, shares, layers, job.stack.gather_bytes), trained
        own, group = divided(columns, trained, 1), zero_groups(columns, 1)[0]
        nodes = np.maximum(1.0, columns.world_size / cluster.devices_per_node)
        domains = np.minimum(nodes, np.ceil(columns.world_size / fabric.domain))
        around = tables.step_s + tables.barrier_s * np.log2(domains)
        one_mean = 8.0 if job.optimizer in ("sgd", "muon") else 0.0  # one moment less is read and written
        # Bytes to accumulate a microbatch's gradients. Under ZeRO 3 a rank accumulates only its shard.
        each = 0.0 if job.stack.fused_sums else 2 * job.stack.grad_bytes + job.stack.weight_bytes
        # Muon: each unsharded matrix is assigned to one of the ranks that share the optimizer. All tp ranks compute the
        # same.
        bf16 = tables.flops["bf16"]
        turning = sum(float(often * gemm_s(tables, m, n, k, 1.0, bf16)) for m, n, k, often in job.turning_products)
        optimizer = own * (ADAM_BYTES - one_mean) / (tables.memory_rate * tables.adam_eff) + around
        return cls(
            stages=stages,
            traffic=traffic_of(job, columns, fabric, moved, layers / chunks),
            own=own,
            every=divided(columns, moved[0], 1),
            each_sum=bytes_s(
                tables, np.where(columns.zero == 3, 0.0, trained.dense + trained.ends + trained.experts) * each
            ),
            optimizer=optimizer + turning * layers / group,
            spread=np.sqrt(2 * np.log(nodes)),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Plans, and their distinct rows for the time of a layer, and for parameters and communication of a rank."""

    columns: Columns
    layers: RowDeduplicator
    ranks: RowDeduplicator
    layer: _Layer
    rank: _Rank

    @classmethod
    def of(cls, job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, fabric: Fabric) -> _Rows:
        layers = RowDeduplicator.of(columns, (*of_costs(columns), *_OF_TERMS))
        layer, chunks = _Layer.of(job, layers.rows, tables, fabric), chunks_per_rank(columns)
        ranks = RowDeduplicator.of(columns, OF_TRAFFIC, [chunks.astype(np.int64)])
        stages = even_layers(job.shape.layers, ranks.rows.pp, chunks[ranks.first])
        rank = _Rank.of(job, cluster, ranks.rows, tables, fabric, stages, chunks[ranks.first])
        return cls(columns, layers, ranks, layer, rank)

    def parts(self) -> Iterator[_Rows]:
        """Yield the plans in chunks. If no rows were deduplicated, all are yielded together, because there are few."""
        if isinstance(self.layers.index, slice):
            yield self
            return
        for start in range(0, len(self.columns), _CHUNK):
            some = slice(start, start + _CHUNK)
            yield replace(self, columns=self.columns[some], layers=self.layers[some], ranks=self.ranks[some])


def step_terms(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> dict[str, Array]:
    """Return the seconds by term (TERMS) of every row."""
    fabric = Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription)
    found = [
        _terms(job, cluster, part, tables, fabric)
        for start in range(0, max(1, len(columns)), _AT_ONCE)
        for part in _Rows.of(job, cluster, columns[slice(start, start + _AT_ONCE)], tables, fabric).parts()
    ]
    if len(found) == 1:
        return found[0]
    return {name: np.concatenate([each[name] for each in found]) for name in TERMS}


def _terms(job: Job, cluster: ClusterSpec, rows: _Rows, tables: Tables, fabric: Fabric) -> dict[str, Array]:
    columns, each, index = rows.columns, rows.layer, rows.layers.index
    terms: dict[str, Array] = {name: np.zeros(len(columns)) for name in TERMS}
    stages = taken(rows.rank.stages, rows.ranks.index)
    lay, top, bottom = each.lay[index], each.top[index], each.bottom[index]
    alone, m = columns.pp == 1, columns.num_micro.astype(np.float64)
    taus = np.stack([stages.first * lay + bottom, stages.middle * lay, stages.last * lay + top])
    taus[1] = np.where(alone, stages.middle * lay + top + bottom, np.where(columns.pp == 2, 0.0, taus[1]))
    worst = np.where(alone, 1, taus.argmax(axis=0))
    layers = np.choose(worst, [stages.first, stages.middle, stages.last])
    times = m * layers
    for name, seconds in each.layer.items():
        if seconds.any():
            terms[name] = terms[name] + times * seconds[index]
    for part, rank in ((each.head, 2), (each.embed, 0)):
        here = (worst == rank) | alone
        for name, seconds in part.items():
            if seconds.any():
                terms[name] = terms[name] + np.where(here, m * seconds[index], 0.0)
    if not alone.all():
        total = job.shape.layers * lay + top + bottom
        slack = np.maximum(0.0, total - taus.max(axis=0))
        terms["bubble"], terms["pp_p2p"] = _pipeline_s(job, rows, fabric, layers, lay, slack)
    if job.frozen is not None:
        terms["frozen"] = _frozen_s(job, columns, tables, fabric, taken(each.costs, index))
    _step_terms(job, rows, cluster, tables, stages, terms)
    return terms


def _layer_terms(job: Job, columns: Columns, costs: LayerCosts) -> tuple[Array, Array, dict[str, Array]]:
    forward = costs.gemm_f + costs.attn_f + costs.memory_f
    backward = costs.gemm_b + costs.attn_b + costs.memory_b
    repeated = np.zeros(len(columns))
    for name, seconds in replay_s(job, columns, costs).items():
        repeated = np.where(columns.recompute == RECOMPUTES.index(name), seconds, repeated)
    repeated = repeated * columns.recompute_share + tiles_s(job, columns, costs)
    idle_f = np.maximum(0.0, costs.host_f - forward - costs.tp_f - costs.cp_f - costs.ep_f)
    twice = (columns.recompute == RECOMPUTES.index("full")) * columns.recompute_share
    calls_b = costs.host_f * (_HOST_BACKWARD + twice)
    idle_b = np.maximum(0.0, calls_b - backward - costs.tp_b - costs.cp_b - costs.ep_b - repeated)
    return (
        idle_f,
        idle_b,
        {
            "gemm": costs.gemm_f + costs.gemm_b,
            "attention": costs.attn_f + costs.attn_b,
            "memory_bound": costs.memory_f + costs.memory_b,
            "host": idle_f + idle_b,
            "recompute": repeated,
            "tp": costs.tp_f + costs.tp_b,
            "cp": costs.cp_f + costs.cp_b,
            "ep": costs.ep_f + costs.ep_b,
        },
    )


def _pipeline_s(job: Job, rows: _Rows, fabric: Fabric, layers: Array, lay: Array, slack: Array) -> tuple[Array, Array]:
    columns, each, index = rows.columns, rows.layer, rows.layers.index
    forward = layers * each.computes[index]
    # A compiled block computes all its gradients in one program, so weight gradients cannot be deferred.
    put_off = np.where(columns.compile, 0.0, layers * each.costs.wgrad[index])
    bubble = bubble_s(columns, forward, layers * lay - forward, put_off, slack)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    slices, width = np.where(columns.sp, columns.tp, 1), np.where(columns.in_fp32, 4.0, 2.0)
    sent = fabric.send_s(tokens * job.shape.crossings * job.shape.hidden * width / slices, columns.stride("pp"))
    many = hidden_sends(columns) if job.stack.overlap_p2p else sends(columns)
    return bubble, many * sent


def _frozen_s(job: Job, columns: Columns, tables: Tables, fabric: Fabric, costs: LayerCosts) -> Array:
    work, second = job.frozen, second_job(job)
    found = np.zeros(len(columns))
    if work is not None and work.own:
        found = found + work.own * _forwards_s(job, columns, tables, fabric, costs)
    if work is not None and second is not None and work.other:
        others = layer_costs(second, columns, tables, fabric)
        found = found + work.other * _forwards_s(second, columns, tables, fabric, others)
    return found


def _forwards_s(job: Job, columns: Columns, tables: Tables, fabric: Fabric, costs: LayerCosts) -> Array:
    each = costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f + costs.cp_f + costs.ep_f
    each = np.maximum(each, costs.host_f)
    # Forward runs one of the head's three matmuls, or one of two if the head is frozen, and half of its communication.
    head = costs.head_gemm / (3 if job.adapter is None else 2) + costs.head_memory / 3 + costs.head_tp / 2
    first = costs.embed / 2 + costs.embed_tp
    stages, piped = split_layers(job.shape.layers, columns), columns.pp > 1
    longest = np.maximum(np.maximum(stages.first * each + first, stages.last * each + head), stages.middle * each)
    forward = np.where(piped, longest, stages.middle * each + first + head)
    layers = np.where(piped, stages.first, stages.middle)
    held = rank_shares(job, columns, layers, True, False)
    window = Window(forward=forward, backward=np.zeros_like(forward), layers=layers / chunks_per_rank(columns))
    moved = shares_in_format(job, columns, held, layers, job.stack.gather_bytes)
    waits = gathered_s(job, columns, tables, fabric, moved, window)
    filling = (columns.pp - 1) / chunks_per_rank(columns)
    return columns.num_micro * (forward + waits) + filling * forward


def _step_terms(
    job: Job, rows: _Rows, cluster: ClusterSpec, tables: Tables, stages: Stages, terms: dict[str, Array]
) -> None:
    """Add to `terms` the communication, accumulation, update and offloading of a step.

    The straggler term is added last, because it depends on all others.
    """
    columns, each, rank, kind = rows.columns, rows.layer, rows.rank, rows.ranks.index
    layers = np.where(columns.pp == 1, stages.middle, stages.first)
    forward, backward = layers * each.forward[rows.layers.index], layers * each.backward[rows.layers.index]
    window = Window(forward=forward, backward=backward, layers=layers)
    terms["dp_exposed"], terms["contention"] = exposed_s(job, columns, tables, taken(rank.traffic, kind), window)
    terms["memory_bound"] = terms["memory_bound"] + (columns.num_micro - 1) * rank.each_sum[kind]
    terms["optimizer"] = rank.optimizer[kind]
    if is_offloaded(columns):
        kept = each.kept[rows.layers.index]
        states = rank.own[kind], rank.every[kind]
        terms["offload"] = offload_s(job, columns, tables, window, states, kept, cluster.devices_per_node)
    busy = np.sum([terms[name] for name in TERMS if name != "straggler"], axis=0)
    terms["straggler"] = busy * tables.straggler * rank.spread[kind]
