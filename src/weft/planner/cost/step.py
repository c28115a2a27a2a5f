"""A step on devices of their own: seconds by term and bytes by class of many plans at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.host_cost import LayerWork, offload_s
from weft.planner.cost.layer_cost import LayerCosts, layer_costs
from weft.planner.cost.machine import Fabric, Tables, bytes_s, gemm_s
from weft.planner.cost.memory import memory_bytes
from weft.planner.cost.overlap import Window, exposed_s, gathered_s
from weft.planner.cost.pipeline import (
    Stages,
    balanced_layers,
    bubble_s,
    chunks_per_rank,
    hidden_sends,
    sends,
    split_layers,
)
from weft.planner.cost.recompute_cost import budget_s, replay_s
from weft.planner.cost.shares import Shares, rank_shares, second_job, shares_in_format, trained_shares
from weft.planner.space import Columns, Job
from weft.spec import ClusterSpec
from weft.spec.plan import RECOMPUTES

Array = NDArray[np.float64]
#: Seconds by term and bytes by class, one entry per plan.
Parts = tuple[Mapping[str, Array], Mapping[str, Array]]

#: The terms of a step, in the order in which they are shown.
TERMS = (
    "gemm",
    "attention",
    "memory_bound",
    "host",
    "recompute",
    "frozen",
    "tp",
    "cp",
    "ep",
    "pp_p2p",
    "bubble",
    "dp_exposed",
    "contention",
    "optimizer",
    "offload",
    "straggler",
)
#: Host time of a layer's backward over that of its forward.
_HOST_BACKWARD = 1.3
#: Rows that are worked on at a time: their columns stay in the processor's cache.
_CHUNK = 1 << 14


def device_parts(
    job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, *, timed: bool = True, weighed: bool = True
) -> Iterator[Parts]:
    """Yield the seconds by term (TERMS) and bytes by class (CLASSES, and "host") of every row, some rows at a time.

    Args:
        job: model, sequence and batch.
        cluster: gives the size of a node.
        columns: the plans.
        tables: constants of the device.
        timed: with seconds; without them it is a small part of the work.
        weighed: with bytes.
    """
    fabric = Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription)
    on_device = cluster.device.memory_bytes
    if not timed:
        yield {}, memory_bytes(job, columns, tables, split_layers(job.shape.layers, columns), on_device)
        return
    for start in range(0, max(1, len(columns)), _CHUNK):
        some = columns[slice(start, start + _CHUNK)]
        terms, stages = _chunk(job, cluster, some, tables, fabric)
        yield terms, memory_bytes(job, some, tables, stages, on_device) if weighed else {}


def _chunk(
    job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, fabric: Fabric
) -> tuple[dict[str, Array], Stages]:
    costs = layer_costs(job, columns, tables, fabric)
    terms: dict[str, Array] = {name: np.zeros(len(columns)) for name in TERMS}
    idle_f, idle_b, layer = _layer_terms(job, columns, costs)
    layer["recompute"] = layer["recompute"] + budget_s(job, columns, costs)
    head = {"gemm": costs.head_gemm, "memory_bound": costs.head_memory, "tp": costs.head_tp}
    embed = {"memory_bound": costs.embed, "tp": costs.embed_tp}
    lay, top, bottom = (np.sum(list(each.values()), axis=0) for each in (layer, head, embed))
    stages = split_layers(job.shape.layers, columns)
    if job.stack.balanced_stages:
        stages = balanced_layers(job.shape.layers, columns, bottom / lay, top / lay)
    taus = np.stack([stages.first * lay + bottom, stages.middle * lay, stages.last * lay + top])
    taus[1] = np.where(columns.pp == 1, stages.middle * lay + top + bottom, np.where(columns.pp == 2, 0.0, taus[1]))
    worst = np.where(columns.pp == 1, 1, taus.argmax(axis=0))
    layers = np.choose(worst, [stages.first, stages.middle, stages.last])
    m = columns.num_micro.astype(np.float64)
    for name, seconds in layer.items():
        terms[name] = terms[name] + m * layers * seconds
    for part, rank in ((head, 2), (embed, 0)):
        here = (worst == rank) | (columns.pp == 1)
        for name, seconds in part.items():
            terms[name] = terms[name] + np.where(here, m * seconds, 0.0)
    _pipeline_terms(job, columns, tables, fabric, costs, layers, lay, (taus, top, bottom), terms)
    if job.frozen is not None:
        terms["frozen"] = _frozen_s(job, columns, tables, fabric, costs)
    _step_terms(job, columns, cluster, tables, fabric, (costs, idle_f, idle_b), stages, terms)
    return terms, stages


def _layer_terms(job: Job, columns: Columns, costs: LayerCosts) -> tuple[Array, Array, dict[str, Array]]:
    """Seconds of one pass of one layer: waiting for the host in forward and in backward, and every term."""
    forward = costs.gemm_f + costs.attn_f + costs.memory_f
    backward = costs.gemm_b + costs.attn_b + costs.memory_b
    repeated = np.zeros(len(columns))
    for name, seconds in replay_s(job, columns, costs).items():
        repeated = np.where(columns.recompute == RECOMPUTES.index(name), seconds, repeated)
    repeated = repeated * columns.recompute_share
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


def _pipeline_terms(
    job: Job,
    columns: Columns,
    tables: Tables,
    fabric: Fabric,
    costs: LayerCosts,
    layers: Array,
    lay: Array,
    ends: tuple[Array, Array, Array],
    terms: dict[str, Array],
) -> None:
    taus, top, bottom = ends
    total = job.shape.layers * lay + top + bottom
    slack = np.maximum(0.0, total - taus.max(axis=0))
    forward = layers * (costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f)
    # A compiled block makes all its gradients in one program: there is nothing to put off.
    put_off = np.where(columns.compile, 0.0, layers * costs.wgrad)
    terms["bubble"] = bubble_s(columns, forward, layers * lay - forward, put_off, slack)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    slices = np.where(columns.sp | job.stack.scatter_p2p, columns.tp, 1)
    each = fabric.send_s(tokens * job.shape.crossings * job.shape.hidden * 2.0 / slices, columns.stride("pp"))
    many = hidden_sends(columns) if job.stack.overlap_p2p else sends(columns)
    terms["pp_p2p"] = many * each


def _frozen_s(job: Job, columns: Columns, tables: Tables, fabric: Fabric, costs: LayerCosts) -> Array:
    """Seconds of a step's forward passes without gradients: of the trained model, and of a second one."""
    work, second = job.frozen, second_job(job)
    found = np.zeros(len(columns))
    if work is not None and work.own:
        found = found + work.own * _forwards_s(job, columns, tables, fabric, costs)
    if work is not None and second is not None and work.other:
        others = layer_costs(second, columns, tables, fabric)
        found = found + work.other * _forwards_s(second, columns, tables, fabric, others)
    return found


def _forwards_s(job: Job, columns: Columns, tables: Tables, fabric: Fabric, costs: LayerCosts) -> Array:
    """Seconds of a forward of all passes of a step on the longest stage, with a pipeline's filling."""
    each = costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f + costs.cp_f + costs.ep_f
    each = np.maximum(each, costs.host_f)
    # Of the head's products, one of three is forward's; of a frozen head, one of two. Of its traffic, one of two.
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


def _sums_s(job: Job, columns: Columns, tables: Tables, shares: Shares) -> Array:
    """Seconds to add each pass's gradients to those of the passes before. Under ZeRO 3 a rank adds its shard alone."""
    stack = job.stack
    each = 0.0 if stack.fused_sums else 2 * stack.grad_bytes + stack.weight_bytes  # fused: hidden under the arithmetic
    params = np.where(columns.zero == 3, 0.0, shares.dense + shares.ends + shares.experts)
    return (columns.num_micro - 1) * bytes_s(tables, params * each)


def _turning_s(job: Job, tables: Tables, layers: Array) -> Array:
    """Seconds in which Muon orthogonalises its matrices, of so many layers on a rank: each is dealt out whole to one of
    the ranks that share the optimizer, and ranks of tp all turn the same.
    """
    each = [times * gemm_s(tables, m, n, k, 1.0, tables.flops["bf16"]) for m, n, k, times in job.turning_products]
    return sum((float(one) for one in each), 0.0) * layers


def _step_terms(
    job: Job,
    columns: Columns,
    cluster: ClusterSpec,
    tables: Tables,
    fabric: Fabric,
    layer: tuple[LayerCosts, Array, Array],
    stages: Stages,
    terms: dict[str, Array],
) -> None:
    costs, idle_f, idle_b = layer
    first = rank_shares(job, columns, stages.first, True, False)
    both = rank_shares(job, columns, stages.middle, True, True)
    alone = columns.pp == 1
    shares = Shares(
        dense=np.where(alone, both.dense, first.dense),
        experts=np.where(alone, both.experts, first.experts),
        ends=np.where(alone, both.ends, first.ends),
    )
    layers = np.where(alone, stages.middle, stages.first)
    forward = layers * (costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f + idle_f)
    backward = layers * (costs.gemm_b + costs.attn_b + costs.memory_b + costs.tp_b + idle_b)
    trained = trained_shares(job, columns, shares, layers, (True, alone))
    window = Window(forward=forward, backward=backward, layers=layers / chunks_per_rank(columns))
    moved = shares_in_format(job, columns, shares, layers, job.stack.gather_bytes), trained
    terms["dp_exposed"], terms["contention"] = exposed_s(job, columns, tables, fabric, moved, window)
    group = np.where(columns.zero >= 1, columns.dp_shard * columns.cp, 1)
    spread = columns.tp if job.stack.fold_experts else 1
    expert_group = np.where(columns.zero >= 1, np.maximum(1, columns.dp_shard * columns.cp * spread // columns.ep), 1)
    own = (trained.dense + trained.ends) / group + trained.experts / expert_group
    terms["memory_bound"] = terms["memory_bound"] + _sums_s(job, columns, tables, trained)
    nodes = np.maximum(1.0, columns.world_size / cluster.devices_per_node)
    domains = np.minimum(nodes, np.ceil(columns.world_size / fabric.domain))
    around = tables.step_s + tables.barrier_s * np.log2(domains)
    one_mean = 8.0 if job.optimizer in ("sgd", "muon") else 0.0  # one mean is read and written less
    terms["optimizer"] = own * (job.stack.adam_bytes - one_mean) / (tables.memory_rate * tables.adam_eff) + around
    terms["optimizer"] = terms["optimizer"] + _turning_s(job, tables, layers / group)
    each = np.maximum(1.0, layers)
    work = LayerWork(forward=forward / each, backward=backward / each, layers=layers, own=own)
    terms["offload"] = offload_s(job, columns, tables, work, cluster.devices_per_node)
    busy = np.sum([terms[name] for name in TERMS if name != "straggler"], axis=0)
    terms["straggler"] = busy * tables.straggler * np.sqrt(2 * np.log(nodes))
