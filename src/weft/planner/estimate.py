"""Step time and memory of many plans at once: one numpy array per term, one entry per plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.collective_cost import Fabric
from weft.planner.cost.host_cost import Work, offload_s
from weft.planner.cost.kernels import bytes_s
from weft.planner.cost.layer_cost import LayerCosts, layer_costs
from weft.planner.cost.memory_cost import CLASSES, memory_bytes, rank_shares
from weft.planner.cost.overlap import Shares, Window, exposed_s
from weft.planner.cost.pipeline_cost import (
    balanced_layers,
    bubble_s,
    chunks_per_rank,
    hidden_sends,
    sends,
    split_layers,
)
from weft.planner.cost.recompute_cost import budget_s, replay_s
from weft.planner.cost.tables import Tables
from weft.planner.space.columns import Columns, Job
from weft.spec import ClusterSpec
from weft.spec.plan import RECOMPUTES

Array = NDArray[np.float64]

#: The terms of a step, in the order in which they are shown.
TERMS = (
    "gemm",
    "attention",
    "memory_bound",
    "host",
    "recompute",
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
_CHUNK = 1 << 15
#: Relative standard deviation of predicted memory, as `fits_probability` takes it.
_MEMORY_SD = 0.05


@dataclass(frozen=True, slots=True)
class Estimates:
    """What `estimate` says of each plan.

    terms: seconds of one optimizer step by name (TERMS); they sum to `step_s`. memory: bytes on the fullest rank by
    class (CLASSES); they sum to `total_bytes`. usable_bytes: what a run can use of the device's memory.
    tokens: of one step. model_flops: of one step, by the convention of `model_flops`.
    """

    terms: Mapping[str, Array]
    memory: Mapping[str, Array]
    usable_bytes: float
    tokens: float
    world_size: NDArray[np.int64]

    @property
    def step_s(self) -> Array:
        """Seconds of one optimizer step."""
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def tokens_per_s(self) -> Array:
        """Tokens a second over all devices."""
        return self.tokens / self.step_s

    @property
    def allocated_bytes(self) -> Array:
        """Bytes in tensors at the fullest moment (torch.cuda.max_memory_allocated)."""
        outside = ("communicators", "context", "reserve")
        return np.sum([self.memory[name] for name in CLASSES if name not in outside], axis=0)

    @property
    def reserved_bytes(self) -> Array:
        """Bytes that the allocator holds (torch.cuda.max_memory_reserved)."""
        return self.allocated_bytes + self.memory["reserve"]

    @property
    def total_bytes(self) -> Array:
        """All bytes on the device: what the driver's tools show."""
        return np.sum(list(self.memory.values()), axis=0)

    @property
    def fits_probability(self) -> Array:
        """Chance that the plan runs without falling short of memory, 0 to 1."""
        room = np.log(self.usable_bytes / np.maximum(self.total_bytes, 1.0)) / _MEMORY_SD
        return 1.0 / (1.0 + np.exp(-1.702 * np.clip(room, -40, 40)))  # the logistic curve nearest to the normal one


def estimate(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Estimates:
    """Predict every row of `columns`. Rows that no rule allows get numbers too; prune them first.

    cluster: gives the size of a node; the rates are the tables'.
    """
    fabric = Fabric.of(tables, cluster.devices_per_node)
    if tables.laws is not None:
        from weft.planner.measured.host import host_estimate

        return _estimates(job, columns, tables, [host_estimate(job, columns, tables.laws)])
    parts = [
        _chunk(job, cluster, columns[slice(start, start + _CHUNK)], tables, fabric)
        for start in range(0, max(1, len(columns)), _CHUNK)
    ]
    return _estimates(job, columns, tables, parts)


def _estimates(
    job: Job, columns: Columns, tables: Tables, parts: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]]
) -> Estimates:
    none = [np.zeros(len(columns))]
    return Estimates(
        terms={
            name: np.concatenate([part[0][name] for part in parts if name in part[0]] or none)
            * tables.learned.get(name, 1.0)
            for name in TERMS
        },
        memory={name: np.concatenate([part[1][name] for part in parts]) for name in CLASSES},
        usable_bytes=tables.memory_bytes * tables.usable,
        tokens=float(job.global_batch) * job.seq_len,
        world_size=columns.world_size,
    )


def _chunk(
    job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, fabric: Fabric
) -> tuple[dict[str, Array], dict[str, Array]]:
    costs = layer_costs(job, columns, tables, fabric)
    terms = dict.fromkeys(TERMS, np.zeros(len(columns)))
    *idle, layer = _layer_terms(job, columns, costs)
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
    _step_terms(job, columns, cluster, tables, fabric, (costs, *idle), stages, terms)
    return terms, memory_bytes(job, columns, tables, stages)


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
    each = fabric.send_s(tokens * job.shape.hidden * 2.0 / slices, columns.stride("pp"))
    many = hidden_sends(columns) if job.stack.overlap_p2p else sends(columns)
    terms["pp_p2p"] = many * each


def _sums_s(job: Job, columns: Columns, tables: Tables, shares: Shares) -> Array:
    """Seconds to add each pass's gradients to those of the passes before. Under ZeRO 3 a rank adds its shard alone."""
    stack = job.stack
    each = 0.0 if stack.fused_sums else 2 * stack.grad_bytes + stack.weight_bytes  # fused: hidden under the arithmetic
    params = np.where(columns.zero == 3, 0.0, shares.dense + shares.ends + shares.experts)
    return (columns.num_micro - 1) * bytes_s(tables, params * each)


def _step_terms(
    job: Job,
    columns: Columns,
    cluster: ClusterSpec,
    tables: Tables,
    fabric: Fabric,
    layer: tuple[LayerCosts, Array, Array],
    stages: Any,
    terms: dict[str, Array],
) -> None:
    costs, idle_f, idle_b = layer
    first = rank_shares(job, columns, stages.first, True, False)
    both = rank_shares(job, columns, stages.middle, True, True)
    alone = columns.pp == 1
    shares = type(first)(*(np.where(alone, getattr(both, n), getattr(first, n)) for n in ("dense", "experts", "ends")))
    layers = np.where(alone, stages.middle, stages.first)
    forward = layers * (costs.gemm_f + costs.attn_f + costs.memory_f + costs.tp_f + idle_f)
    backward = layers * (costs.gemm_b + costs.attn_b + costs.memory_b + costs.tp_b + idle_b)
    window = Window(forward=forward, backward=backward, layers=layers / chunks_per_rank(columns))
    terms["dp_exposed"], terms["contention"] = exposed_s(job, columns, tables, fabric, shares, window)
    group = np.where(columns.zero >= 1, columns.dp_shard * columns.cp, 1)
    spread = columns.tp if job.stack.fold_experts else 1
    expert_group = np.where(columns.zero >= 1, np.maximum(1, columns.dp_shard * columns.cp * spread // columns.ep), 1)
    own = (shares.dense + shares.ends) / group + shares.experts / expert_group
    terms["memory_bound"] = terms["memory_bound"] + _sums_s(job, columns, tables, shares)
    nodes = np.maximum(1.0, columns.world_size / cluster.devices_per_node)
    around = tables.step_s + tables.barrier_s * np.log2(nodes)
    terms["optimizer"] = own * job.stack.adam_bytes / (tables.memory_rate * tables.adam_eff) + around
    each = np.maximum(1.0, layers)
    work = Work(forward=forward / each, backward=backward / each, layers=layers, own=own)
    terms["offload"] = offload_s(job, columns, tables, work, cluster.devices_per_node)
    busy = np.sum([terms[name] for name in TERMS if name != "straggler"], axis=0)
    terms["straggler"] = busy * tables.straggler * np.sqrt(2 * np.log(nodes))
