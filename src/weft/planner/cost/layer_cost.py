"""Seconds of one layer, of the embedding and of the head on one rank, for every distinct way to cut them.

Letters: M tokens of a microbatch on a rank, h hidden, q and kv widths of queries and of keys on a rank, f feed-forward
width on a rank, V vocabulary on a rank, t tensor-parallel size, s sequence, c context-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import context_cost
from weft.planner.cost.alike import Alike
from weft.planner.cost.layer_kernels import Ends, beside_adapter, cut_of, kernels, partly_trained, traced_kernels
from weft.planner.cost.machine import Fabric, Tables, bytes_s, gemm_s
from weft.planner.space import Columns, Job, TracedShape

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds by part; one entry per distinct cut. A layer is the mean over the model's layers.

    *_f forward, *_b backward (wgrad: the part of it that makes weight gradients). last_f: of gemm_f, the product whose
    result is the layer's own, where a dense layer has one. tp, cp, ep: exposed communication. head and embed: loss,
    head and embedding, communication in it. host_f: host seconds of a layer's forward; none in a graph.
    """

    gemm_f: Array
    last_f: Array
    gemm_b: Array
    wgrad: Array
    attn_f: Array
    attn_b: Array
    memory_f: Array
    memory_b: Array
    tp_f: Array
    tp_b: Array
    cp_f: Array
    cp_b: Array
    ep_f: Array
    ep_b: Array
    host_f: Array
    head_gemm: Array
    head_memory: Array
    head_tp: Array
    embed: Array
    embed_tp: Array

    def rows(self, index: NDArray[np.intp] | slice) -> LayerCosts:
        """Return the costs of plans, by the cut that each has."""
        return LayerCosts(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


#: The columns that everything here reads.
_OF_COSTS = ("tp", "cp", "cp_mode", "ep", "sp", "tp_chunks", "microbatch", "precision", "compile", "graphs", "order")


def of_costs(columns: Columns) -> tuple[str, ...]:
    """Return the columns that decide a layer's costs. Of other orders neighbours of one size may lie near or far."""
    return (*_OF_COSTS, "pp", "dp_replicate", "dp_shard") if columns.order.any() else _OF_COSTS


def layer_costs(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    """Return one entry per row of `columns`; rows that cut a layer alike are computed once.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        tables: constants of the device.
        fabric: of the links between devices.
    """
    kinds = Alike.of(columns, of_costs(columns))
    return distinct_costs(job, kinds.rows, tables, fabric).rows(kinds.index)


def distinct_costs(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    """Return one entry per row of `columns`, each computed; of the plans it reads `of_costs`."""
    shape, stack = job.shape, job.stack
    cut = cut_of(job, columns, tables)
    tokens, q, kv, half, width = cut.tokens, cut.q, cut.kv, cut.half, cut.width
    t = columns.tp.astype(np.float64)
    if isinstance(shape, TracedShape):
        made, ends = traced_kernels(job, shape, columns, tables, cut)
    else:
        made, ends = kernels(job, columns, tables, cut), Ends(embed=bytes_s(tables, tokens * shape.hidden * 16.0))
    if job.adapter is not None:
        made = beside_adapter(job, job.adapter, made, tokens, t)
    made = partly_trained(job, made)
    moved_f, moved_b = made.moved_f, made.moved_b
    if (columns.cp > 1).any():
        joined_f, joined_b = context_cost.joined_bytes(job, columns, tokens, q, kv)
        moved_f, moved_b = moved_f + joined_f, moved_b + joined_b
    head = _head(job, columns, tables, fabric, tokens, half) if shape.vocab else (np.zeros_like(tokens),) * 3
    tp_f, tp_b = _tp(job, columns, tables, fabric, tokens, made.gemm_f, made.dgrad + made.wgrad)
    cp_f, cp_b = context_cost.traffic_s(job, columns, tables, fabric, tokens, q, kv, made.attn_f, made.attn_b)
    ep = _ep(job, columns, fabric, tokens)
    # A piece more is a collective and a product more, four times in a layer.
    calls = made.calls + np.where(t > 1, 8 * columns.tp_chunks - 4, 0) + context_cost.calls(columns)
    gathers_table = (t > 1) & (shape.vocab > 0)
    return LayerCosts(
        gemm_f=made.gemm_f * width,
        last_f=made.last * width,
        gemm_b=(made.dgrad + made.wgrad) * width,
        wgrad=made.wgrad * width,
        attn_f=made.attn_f,
        attn_b=made.attn_b,
        memory_f=bytes_s(tables, moved_f) * width + calls * 0.5 * tables.launch_s,
        memory_b=bytes_s(tables, moved_b) * width + calls * 0.7 * tables.launch_s,
        tp_f=tp_f * made.sums,
        tp_b=tp_b * made.sums,
        cp_f=cp_f,
        cp_b=cp_b,
        ep_f=ep,
        ep_b=ep,
        host_f=np.where(columns.graphs | stack.cuda_graphs, 0.0, calls * tables.host_op_s / stack.host_gain),
        head_gemm=head[0] * _head_share(job) + ends.after_gemm * width,
        head_memory=head[1] + ends.after_memory * width,
        head_tp=head[2],
        embed=ends.embed,
        embed_tp=np.where(
            gathers_table, fabric.ring_s("all_reduce", tokens * shape.hidden * 2, t, columns.tp_stride), 0.0
        ),
    )


def _head_share(job: Job) -> float:
    """Of the head's three products, those that are made: a frozen head has no gradient of its weight."""
    trained = 0.0 if job.adapter is not None else 1.0 if job.trained is None else job.trained.head
    return (2 + trained) / 3


def _head(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, peak: Array
) -> tuple[Array, Array, Array]:
    """Seconds of the head and the loss, forward and backward: matmul, memory, communication."""
    shape, t = job.shape, columns.tp.astype(np.float64)
    vocab = padded_vocab(job, t) / t
    h = shape.hidden * np.ones_like(tokens)
    m, n, k = np.stack([tokens, tokens, vocab]), np.stack([vocab, h, h]), np.stack([h, vocab, tokens])
    gemm = gemm_s(tables, m, n, k, 1.0, peak).sum(axis=0)
    fused = job.stack.fused_loss | columns.compile
    memory = bytes_s(tables, tokens * vocab * np.where(fused, 20.0, 48.0))
    stride = columns.tp_stride
    wide = fabric.ring_s("all_reduce", tokens * shape.hidden * 2, t, stride)
    comm = np.where(t > 1, 3 * fabric.ring_s("all_reduce", tokens * 4, t, stride) + wide, 0.0)
    return gemm, memory, comm


def padded_vocab(job: Job, tp: Array) -> Array:
    """Count the rows of the embedding table after the stack's padding."""
    unit = job.stack.vocab_multiple * tp
    return np.ceil(job.shape.vocab / unit) * unit


def _tp(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, gemm_f: Array, gemm_b: Array
) -> tuple[Array, Array]:
    """Exposed seconds of a layer's tensor-parallel collectives: forward, backward."""
    t, stride = columns.tp.astype(np.float64), columns.tp_stride
    size = tokens * job.shape.hidden * 2.0
    whole = fabric.ring_s("all_reduce", size, t, stride)
    gather = fabric.ring_s("all_gather", size, t, stride)
    again = 2.0 if job.stack.regather_sp else 0.0
    forward = np.where(columns.sp, 4 * gather, 2 * whole)
    backward = np.where(columns.sp, (4 + again) * gather, 2 * whole)
    slow = tables.overlap_compute - 1
    under_f, under_b = gemm_f / tables.overlap_compute, gemm_b / tables.overlap_compute
    if not job.stack.overlap_tp:
        # What travels for the input's gradient hides under the matmul of the weight's, and the other way round.
        beside = np.where(columns.sp, 4 * gather, backward) if job.stack.overlap_tp_backward else np.zeros_like(whole)
        hidden_f, hidden_b = np.zeros_like(whole), np.minimum(beside, under_b)
        if (columns.tp_chunks > 1).any():
            # All of forward in pieces, of backward the gathers for row-cut layers: of each the first travels alone.
            pieces = np.where(columns.sp, columns.tp_chunks, 1).astype(np.float64)
            piece = fabric.ring_s("all_gather", size / pieces, t, stride)
            later, more = (pieces - 1) * piece, np.where(pieces > 1, pieces * piece - gather, 0.0)
            forward, backward = forward + 4 * more, backward + 2 * more
            hidden_f, hidden_b = np.minimum(4 * later, under_f), np.minimum(beside + 2 * later, under_b)
        return forward - hidden_f * (2 - tables.overlap_compute), backward - hidden_b * (2 - tables.overlap_compute)
    # In slices: the first travels alone, the others under the matmul of the slice before.
    slices = np.where(columns.sp, 1.0, 0.0) * (t - 1) / t
    hidden_f, hidden_b = np.minimum(forward, under_f) * slices, np.minimum(backward, under_b) * slices
    return forward - hidden_f * (1 - slow), backward - hidden_b * (1 - slow)


def _ep(job: Job, columns: Columns, fabric: Fabric, tokens: Array) -> Array:
    """Seconds of sending tokens to their experts and back, in a mean layer; backward takes as long."""
    shape, t, e = job.shape, columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    if not shape.moe_layers:
        return np.zeros_like(tokens)
    size = tokens / t * shape.top_k * shape.hidden * 2.0
    folded = job.stack.fold_experts
    copies = shape.top_k if job.stack.once_per_node else None
    travel = 2 * fabric.all_to_all_s(size, e, 1 if folded else columns.tp, copies)
    if not folded:
        travel = travel + 2 * fabric.ring_s("all_gather", size * t, t, columns.tp_stride)
    return travel * shape.moe_layers / shape.layers
