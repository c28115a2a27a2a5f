"""Costs of a layer on a measured host: contention of ranks, layers of the busiest rank, fitted cost models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.pipeline_schedule import stage_owner
from weft.config.plan import RECOMPUTES, RESHARDS, SCHEDULES
from weft.planner.cost.layer import LayerCosts, padded_vocab
from weft.planner.cost.pipeline import bubble_s, sends
from weft.planner.measured.laws import TINY, Laws
from weft.planner.space.columns import CP_MODES, PRECISIONS, Columns, Job
from weft.planner.space.trained_part import AdapterSize

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostContention:
    """Contention of ranks on a host, with one entry per plan.

    Attributes:
        layers: layers of the pipeline's busiest rank.
        has_embedding, has_head: 1 if this rank has the embedding, the head.
        steady: number of active ranks in the middle of a step, weighted by their load relative to the busiest stage.
        bubble_share: share of a full pipeline bubble that the schedule leaves.
        sends: number of messages that delay the step.
    """

    layers: Array
    has_embedding: Array
    has_head: Array
    steady: Array
    bubble_share: Array
    sends: Array

    def rows(self, chosen: NDArray[np.bool_]) -> HostContention:
        """Return the entries of the chosen plans."""
        return HostContention(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


def contention_of(job: Job, columns: Columns) -> HostContention:
    """Return the contention for every plan. Plans with equal pipelines are computed once."""
    key = np.stack([columns.pp, columns.virtual_stages, columns.schedule.astype(np.int64)])
    kinds, index = np.unique(key, axis=1, return_inverse=True)
    found = np.array([_kind(job, *map(int, kind)) for kind in kinds.T])[index.reshape(-1)]
    count = len(columns)
    one, third = np.ones(count), np.full(count, 1 / 3)
    # Bubble for microbatches in which forward, input gradients and weight gradients take a third each.
    share = bubble_s(columns, third, 2 * third, third, one)
    return HostContention(
        layers=found[:, 0],
        has_embedding=found[:, 1],
        has_head=found[:, 2],
        steady=np.asarray(columns.world_size * found[:, 3], dtype=np.float64),
        bubble_share=np.where(columns.pp > 1, share, 0.0),
        sends=sends(columns),
    )


def ranks_of(job: Job, columns: Columns) -> list[tuple[NDArray[np.bool_], Array, Array, Array]]:
    """Return (mask of plans with this rank, layers, 1 for the embedding, 1 for the head) for each pipeline rank.

    The ranks are the ones of the longest pipeline.
    """
    longest = int(columns.pp.max()) if len(columns) else 0
    key = np.stack([columns.pp, columns.virtual_stages, columns.schedule.astype(np.int64)])
    kinds, index = np.unique(key, axis=1, return_inverse=True)
    table = np.zeros((longest, 3, kinds.shape[1]))
    for place, kind in enumerate(kinds.T):
        layers, first, last = _divided(job, *map(int, kind))
        table[: len(layers), 0, place] = layers
        table[first, 1, place] = table[last, 2, place] = 1.0
    index = index.reshape(-1)
    return [(columns.pp > rank, *(table[rank, part, index] for part in range(3))) for rank in range(longest)]


def _divided(job: Job, pp: int, virtual_stages: int, schedule: int) -> tuple[list[int], int, int]:
    """Return the layers of each rank of a pipeline, and the ranks with embedding and head."""
    shape = job.shape
    num_stages = pp * virtual_stages if pp > 1 else 1
    if shape.layers < num_stages:  # the rules reject these plans, so the value is not used
        return [shape.layers] * pp, 0, pp - 1
    counts = shape.stage_layers(num_stages)
    owners = [stage_owner(SCHEDULES[schedule], pp, stage) for stage in range(num_stages)]
    layers = [sum(n for n, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(pp)]
    return layers, owners[0], owners[-1]


def _kind(job: Job, pp: int, virtual_stages: int, schedule: int) -> tuple[float, float, float, float]:
    """Return the busiest rank's layers, 1 for embedding and head on it, and the average load relative to it."""
    layers, first, last = _divided(job, pp, virtual_stages, schedule)
    layer, head = job.shape.layer_weights, job.shape.head_weights
    work = [count * layer + head * (rank == last) for rank, count in enumerate(layers)]
    busiest = max(range(pp), key=work.__getitem__)
    return float(layers[busiest]), float(first == busiest), float(last == busiest), sum(work) / pp / work[busiest]


# Time (s) of one layer, of the embedding and of the head on one rank of a measured host, from fitted cost models.

#: Average share of a rank's queries that attend to the keys of another rank.
_MET = 0.75
#: Bytes of a value in communication between ranks.
VALUE = 4.0


@dataclass(frozen=True, slots=True)
class ContendedLaws:
    """Fitted cost models with the contention for which they are evaluated: the number of active ranks of each plan."""

    laws: Laws
    active: Array
    dtype: str

    def of(self, op: str, *size: Any) -> Array:
        """Return the time (s) of a compute operation."""
        return self.laws.seconds(op, *size, active=self.active, dtype=self.dtype)

    def passes(self, op: str, tokens: Any, width: Any) -> Array:
        """Return the time (s) of an element-wise operation, forward and backward."""
        return np.stack([self.of(f"{op}_f", tokens, width), self.of(f"{op}_b", tokens, width)])

    def linear(self, m: Any, n: Any, k: Any) -> Array:
        """Return the time (s) of a matmul: forward, input gradient, weight gradient."""
        return np.stack([self.of(op, m, n, k) for op in ("linear_f", "linear_dx", "linear_dw")])

    def transfer_s(self, op: str, num_bytes: Any, group: Any, stride: Any = 1) -> Array:
        """Return the time (s) of a collective over groups of `group` ranks, for each plan."""
        return self._by_group(
            lambda part, size, step, crowd: self.laws.transfer_s(op, part, group=size, active=crowd, stride=step),
            num_bytes, group, stride,
        )  # fmt: skip

    def waiting(self, compute_s: Any, group: Any) -> Array:
        """Return the time (s) that groups of `group` ranks wait at a synchronization, for each plan.

        `compute_s` is the compute time since the last synchronization.
        """
        return self._by_group(
            lambda part, size, _, crowd: self.laws.waiting(part, group=size, active=crowd), compute_s, group, 1
        )

    def _by_group(self, ask: Callable[[Array, int, int, int], Array], amount: Any, group: Any, stride: Any) -> Array:
        """Return the results of `ask`, called as ask(amounts, ranks, stride, active ranks) for each kind of group."""
        rows = np.broadcast_arrays(np.asarray(amount, float), np.asarray(group), np.asarray(stride), self.active)
        amount, group, stride, active = rows
        result = np.zeros(amount.shape)
        for size, step, crowd in {*zip(group.tolist(), stride.tolist(), active.tolist(), strict=True)}:
            if size > 1:
                here = (group == size) & (stride == step) & (active == crowd)
                result[here] = ask(amount[here], int(size), int(step), int(max(size, crowd)))
        return result


def host_layer_costs(job: Job, columns: Columns, laws: Laws) -> LayerCosts:
    """Return the costs of every plan while all ranks are active.

    Args:
        columns: plans with one number format.
    """
    [(dtype, _)] = dtype_of(columns)
    return layer_costs(job, columns, laws, columns.world_size.astype(float), dtype)


def layer_costs(job: Job, columns: Columns, laws: Laws, active: Array, dtype: str) -> LayerCosts:
    """Return the costs of every plan while `active` ranks are active."""
    clock = ContendedLaws(laws, np.broadcast_to(np.asarray(active, float), (len(columns),)), dtype)
    shape = job.shape
    t, c = columns.tp.astype(float), columns.cp.astype(float)
    tokens = columns.microbatch * (job.seq_len / c)
    q, kv = shape.sharded_widths(t)
    products = _products(job, columns, clock, tokens, q, kv)
    if job.adapter is not None:  # frozen weights have no gradients
        thin, unpacked = _adapter_time(job, job.adapter, clock, tokens, t)
        products = products * np.array([1.0, 1.0, 0.0])[:, None] + thin
    else:
        made = 1.0 if job.trained is None else job.trained.layers
        products, unpacked = products * np.array([1.0, 1.0, made])[:, None], np.zeros(len(columns))
    dense = shape.dense_share
    attention = _attention(job, columns, clock, q, kv)
    passes = _passes(job, columns, clock, tokens, q, kv)
    tp = _tp(job, columns, clock, tokens)
    cp = _cp(job, columns, clock, tokens, q, kv)
    ep = _ep(job, columns, clock, tokens)
    host = _host(clock)
    head = _head(job, columns, clock, tokens)
    return LayerCosts(
        gemm_f=products[0],
        last_f=dense * clock.of("linear_f", tokens, float(shape.hidden), shape.ffn / t),
        gemm_b=products[1] + products[2],
        wgrad=products[2],
        attn_f=attention[0],
        attn_b=attention[1],
        memory_f=passes[0] + host[0] + unpacked,
        memory_b=passes[1] + host[1] + unpacked,
        tp_f=tp[0],
        tp_b=tp[1],
        cp_f=cp[0],
        cp_b=cp[1],
        ep_f=ep,
        ep_b=ep,
        host_f=host[0],
        head_gemm=head[0],
        head_memory=head[1],
        head_tp=head[2],
        embed=_embed(job, clock, tokens, t),
        embed_tp=_embed_tp(job, columns, clock, tokens),
    )


def dtype_of(columns: Columns) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return the plans of each measured number format: fp32, and bf16 for all narrower formats."""
    narrow = ~(columns.in_fp32 | (columns.precision == PRECISIONS.index("fp64")))
    return [(name, rows) for name, rows in (("fp32", ~narrow), ("bf16", narrow)) if rows.any()]


def _products(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array, q: Array, kv: Array) -> Array:
    shape, t = job.shape, columns.tp.astype(float)
    h = float(shape.hidden)
    dense = shape.dense_share
    if shape.kv_rank:
        down = float(shape.q_rank + shape.kv_rank + shape.rope_dim)
        wide = q * (1 + shape.rope_dim / shape.head_dim)
        total = clock.linear(tokens, down, h) + clock.linear(tokens, wide, float(shape.q_rank or h))
        total = total + clock.linear(tokens, 2 * q, float(shape.kv_rank))
    else:
        total = clock.linear(tokens, q, h) + 2 * clock.linear(tokens, kv, h)
    total = total + clock.linear(tokens, h, q)
    ups = 2 if shape.gated else 1
    for width, share in ((shape.ffn, dense), (shape.shared_ffn, 1 - dense)):
        if width and share:
            each = np.ceil(width / t)
            total = total + share * (ups * clock.linear(tokens, each, h) + clock.linear(tokens, h, each))
    if shape.moe_layers:
        local = np.maximum(1.0, shape.num_experts / columns.ep)
        each, wide = tokens / t * shape.top_k / local, float(shape.expert_ffn)
        expert = ups * clock.linear(each, wide, h) + clock.linear(each, h, wide)
        total = total + (1 - dense) * (local * expert + clock.linear(tokens / t, float(shape.num_experts), h))
    return total


def _adapter_time(job: Job, adapter: AdapterSize, clock: ContendedLaws, tokens: Array, t: Array) -> tuple[Array, Array]:
    """Return the time (s) of an adapter's matmuls in an average layer, and of dequantizing a quantized base once.

    The former (forward, input gradient, weight gradient) includes the addition to the layer's outputs. Forward and
    backward both dequantize the base.
    """
    if not adapter.products:
        return np.zeros((3, len(tokens))), np.zeros(len(tokens))
    side, rank = adapter.width / 2 / adapter.products, float(adapter.rank)  # tensor parallelism shards one of the two
    made = clock.linear(tokens, rank, side) + clock.linear(tokens, side / t, rank)
    added = clock.of("add", tokens, side / t)
    made = adapter.products * (made + np.stack([added, added, np.zeros_like(added)]))
    h = float(job.shape.hidden)
    unpacked = clock.of("copy", adapter.unpacked_bytes / (2 * VALUE) / t / h, h) if adapter.packed else 0.0 * added
    return made, unpacked


def _embed(job: Job, clock: ContendedLaws, tokens: Array, t: Array) -> Array:
    """Return the time (s) of the embedding, forward and backward. A frozen table is only read."""
    h = float(job.shape.hidden)
    if job.adapter is not None or (job.trained is not None and not job.trained.embedding):
        return clock.of("copy", tokens, h)
    return clock.of("embedding", tokens, h, padded_vocab(job, t) / t)


def _attention(job: Job, columns: Columns, clock: ContendedLaws, q: Array, kv: Array) -> Array:
    """Return the time (s) of attention (forward, backward).

    Ring and gather process the keys in blocks, without a mask for the keys of other ranks. Ulysses processes full
    sequences.
    """
    shape, s = job.shape, float(job.seq_len)
    c = columns.cp.astype(float)
    ulysses = columns.cp_mode == CP_MODES.index("ulysses")
    heads = q / shape.head_dim / np.where(ulysses, c, 1.0)
    rows = np.where(ulysses, s, s / c)
    # A causal call over a rank's own rows is modeled as a square. Blocks of other ranks are unmasked rectangles with
    # twice the computation.
    cut = (c > 1) & ~ulysses
    pieces = np.where(cut, c + 0.5 * (c - 1), 1.0)  # the block of each other rank is one rectangle or two
    width = float(shape.head_dim)
    calls = np.stack(
        [
            clock.of(op, columns.microbatch, heads, rows, width, s) + (pieces - 1) * clock.of(op, 0.0, 1.0, 1.0, 1.0)
            for op in ("attention_f", "attention_b")
        ]
    )
    # Outputs of blocks are scaled and accumulated. Gradients of each block are accumulated too.
    tokens = columns.microbatch * rows
    add_q, add_kv = clock.of("add_to", tokens, q), clock.of("add_to", tokens, kv)
    packed = clock.of("copy", tokens, q + 2 * kv)
    joins = np.stack([packed + (pieces - 1) * 3 * _MET * add_q, packed + pieces * _MET * (add_q + 2 * add_kv)])
    return calls + np.where(cut, joins, 0.0)


def _passes(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array, q: Array, kv: Array) -> Array:
    """Return the time (s) of an average layer's element-wise kernels (forward, backward)."""
    shape, t = job.shape, columns.tp.astype(float)
    h = float(shape.hidden)
    outside = tokens / np.where(columns.sp, t, 1.0)
    add = clock.of("add", outside, h)
    total = 2 * clock.passes("layer_norm" if shape.layer_norm else "norm", outside, h)
    # Forward: two residual additions. Backward: additions at forks of the residual stream, and if matmuls share an
    # input.
    whole = np.where(columns.tp > 1, 0.0, clock.of("add", tokens, h))  # sharded layers add inside their matmuls
    total = total + np.stack([2 * add, 2 * add + (3 if shape.gated else 2) * whole])
    if not shape.learned_positions:
        total = total + clock.passes("rope", tokens, q) + clock.passes("rope", tokens, kv)
    dense = shape.dense_share
    width = sum(shape.ffn_widths(t))
    total = total + clock.passes("swiglu" if shape.gated else "gelu", tokens, width)
    if shape.moe_layers:
        total = total + (1 - dense) * 4 * clock.of("copy", tokens * shape.top_k / t, h)
    return total


def _host(clock: ContendedLaws) -> Array:
    """Return the time (s) of a full layer in addition to its operations: modules, views, autograd nodes."""
    t, d, f, heads = map(float, TINY)
    parts = 4 * clock.linear(t, d, d) + 2 * clock.linear(t, f, d) + clock.linear(t, d, f)
    attention = np.stack([clock.of(op, 1.0, heads, t, d / heads) for op in ("attention_f", "attention_b")])
    adds = clock.of("add", t, d)
    passes = 2 * clock.passes("norm", t, d) + 2 * clock.passes("rope", t, d) + clock.passes("swiglu", t, f)
    known = np.stack([parts[0], parts[1] + parts[2]]) + attention + passes + np.stack([2 * adds, 5 * adds])
    return np.maximum(0.0, clock.passes("block", t, d) - known)


def _head(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array) -> tuple[Array, Array, Array]:
    """Return the time (s) of the head, forward and backward: matmuls, other kernels (norm, loss), communication."""
    shape, t = job.shape, columns.tp.astype(float)
    h, vocab = float(shape.hidden), padded_vocab(job, t) / t
    learnt = 0.0 if job.adapter is not None else 1.0 if job.trained is None else job.trained.head
    products = (clock.linear(tokens, vocab, h) * np.array([1.0, 1.0, learnt])[:, None]).sum(axis=0)
    norm = clock.passes("layer_norm" if shape.layer_norm else "norm", tokens / np.where(columns.sp, t, 1.0), h).sum(
        axis=0
    )
    whole = clock.of("loss_f", tokens, vocab) + clock.of("loss_b", tokens, vocab)
    loss = np.where(columns.tp > 1, clock.of("cut_loss", tokens, vocab), whole)
    wide = tokens * h * VALUE
    sums = clock.transfer_s("all_reduce", tokens * VALUE, columns.tp) + clock.transfer_s(
        "all_reduce", 2 * tokens * VALUE, columns.tp
    )
    cut = clock.transfer_s("all_gather", wide, columns.tp) + clock.transfer_s("reduce_scatter", wide, columns.tp)
    return products, norm + loss, sums + np.where(columns.sp, cut, clock.transfer_s("all_reduce", wide, columns.tp))


def _embed_tp(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array) -> Array:
    wide = tokens * job.shape.hidden * VALUE
    cut = clock.transfer_s("reduce_scatter", wide, columns.tp) + clock.transfer_s("all_gather", wide, columns.tp)
    return np.where(columns.sp, cut, clock.transfer_s("all_reduce", wide, columns.tp))


def _tp(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array) -> Array:
    """Return the time (s) of a layer's tp collectives (forward, backward). Under sp, backward gathers inputs again."""
    wide = tokens * job.shape.hidden * VALUE
    whole = 2 * clock.transfer_s("all_reduce", wide, columns.tp)
    gather = clock.transfer_s("all_gather", wide, columns.tp)
    scatter = clock.transfer_s("reduce_scatter", wide, columns.tp)
    # With several sequences, the ranks' parts are concatenated and split by copies.
    moved = np.where(
        (columns.microbatch > 1) & (columns.tp > 1), clock.of("copy", tokens, float(job.shape.hidden)), 0.0
    )
    forward, backward = 2 * (gather + scatter + 2 * moved), 4 * (gather + moved) + 2 * (scatter + moved)
    return np.stack([np.where(columns.sp, forward, whole), np.where(columns.sp, backward, whole)])


def _cp(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array, q: Array, kv: Array) -> Array:
    """Return the time (s) of a layer's communication over cp (forward, backward)."""
    c = columns.cp
    stride = columns.tp
    both = 2 * tokens * kv * VALUE
    ring = np.stack([(c - 1) * clock.transfer_s("shift", both, c, stride),
                     2 * (c - 1) * clock.transfer_s("shift", both, c, stride)])  # fmt: skip
    gather = clock.transfer_s("all_gather", both * c, c, stride)
    gathered = np.stack([gather, gather + clock.transfer_s("reduce_scatter", both * c, c, stride)])
    swap = sum(clock.transfer_s("all_to_all", tokens * width * VALUE, c, stride) for width in (q, kv, kv, q))
    swap = swap + clock.of("copy", tokens, 4 * q + 4 * kv)
    modes = {"ring": ring, "gather": gathered, "ulysses": np.stack([swap, swap])}
    chosen = np.select([columns.cp_mode == CP_MODES.index(name) for name in modes], list(modes.values()))
    return np.where(c > 1, chosen, 0.0)


def _ep(job: Job, columns: Columns, clock: ContendedLaws, tokens: Array) -> Array:
    """Return the time (s) to send tokens to their experts and back, in an average layer."""
    shape = job.shape
    if not shape.moe_layers:
        return np.zeros(len(columns))
    size = tokens / columns.tp * shape.top_k * shape.hidden * VALUE
    return 2 * clock.transfer_s("all_to_all", size, columns.ep) * shape.moe_layers / shape.layers


# Time that ranks of a host wait for each other, in addition to the time of the collectives.

#: Synchronizations per layer of ZeRO 3 ranks for parameters and gradients, by the plan's `reshard`.
_GATHERS = {"after_forward": 3, "after_backward": 2, "after_step": 2}


def waiting_s(
    job: Job, columns: Columns, clock: ContendedLaws, layers: Array, compute_s: Array, pieces: Array
) -> dict[str, Array]:
    """Return the waiting time (s) of a step by the term that it extends.

    The compute between synchronizations of all axes is assumed to be equal, which is an approximation.

    Args:
        clock: fitted cost models with contention.
        layers: layers of the busiest rank.
        compute_s: compute time of a full step.
        pieces: number of buckets in which gradients are communicated under ZeRO 0 to 2.
    """
    often = _sync_terms(job, columns, layers, pieces)
    between = np.sum([np.where(size > 1, times, 0.0) for size, times in often.values()], axis=0)
    between = compute_s / np.maximum(1.0, between)
    return {name: times * clock.waiting(between, size) for name, (size, times) in often.items()}


def _sync_terms(job: Job, columns: Columns, layers: Array, pieces: Array) -> dict[str, tuple[NDArray[np.int64], Array]]:
    """Return the synchronizing ranks and their number of synchronizations per step, by term."""
    full = columns.recompute == RECOMPUTES.index("full")
    selective = columns.recompute == RECOMPUTES.index("selective")
    passes = columns.num_micro.astype(float)
    every = layers * passes
    shard = columns.dp_shard * columns.cp
    by_unit = columns.zero == 3
    gathers = np.select([columns.reshard == RESHARDS.index(name) for name in _GATHERS], list(_GATHERS.values()))
    once = columns.reduces_once
    # Attention and feed-forward, both in forward and backward. Recompute repeats the first of two reductions.
    tp = every * (4 + columns.recompute_share * (full | selective))
    cp = every * (2 + columns.recompute_share * full)
    ep = every * 4 * job.shape.moe_layers / job.shape.layers
    units = gathers * np.where(once, layers, every)
    # Replicas under local SGD wait for each other at outer steps, and in each step to exchange five numbers.
    pieces = np.where((columns.sync > 0) & (shard == 1), pieces / columns.sync_every, pieces)
    # One more for the norm of all gradients.
    data = 1 + np.where(by_unit, units, pieces)
    return {
        "tp": (columns.tp, tp),
        "cp": (columns.cp, cp),
        "ep": (columns.ep, ep),
        "dp_exposed": (np.where(by_unit, shard, columns.dp_replicate * shard), data),
    }
