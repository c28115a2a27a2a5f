"""Seconds of one layer, of the embedding and of the head on one rank, for every distinct way to cut them.

Letters: M tokens of a microbatch on a rank, h hidden, q and kv widths of queries and of keys on a rank, f feed-forward
width on a rank, V vocabulary on a rank, t tensor-parallel size, s sequence, c context-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from weft.planner import context_cost
from weft.planner.collective_cost import Fabric
from weft.planner.columns import PRECISIONS, Columns, Job
from weft.planner.kernels import bytes_s, core_s, flash_s, gemm_s
from weft.planner.shape import Shape
from weft.planner.tables import Tables
from weft.planner.traced import (
    Cut,
    TracedShape,
    attention_s,
    end_s,
    moved_bytes,
    num_calls,
    products_s,
    tensor_traffic,
)

Array = NDArray[np.float64]

#: Calls of kernels by one layer: forward, and backward over forward (autograd's C++ calls cost about as much).
_CALLS_FUSED, _CALLS_EAGER = 22, 40


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds by part; one entry per distinct cut. A layer is the mean over the model's layers.

    *_f forward, *_b backward (wgrad: the part of it that makes weight gradients). last_f: of gemm_f, the product whose
    result is the layer's own, where a dense layer has one. tp, cp, ep: exposed communication. head and embed: loss,
    head and embedding, communication in it. calls_f: host seconds of one layer's forward.
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

    def rows(self, index: NDArray[np.intp]) -> LayerCosts:
        """The costs of plans, by the cut that each has."""
        return LayerCosts(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


def layer_costs(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    """One entry per row of `columns`; rows that cut a layer alike are computed once."""
    key = columns.tp
    for name, size in (("microbatch", 1 << 20), ("cp", 1 << 12), ("ep", 1 << 12)):
        key = key * size + getattr(columns, name)
    code = columns.precision * 16 + columns.sp * 8 + columns.compile * 4 + columns.cp_mode.astype(np.int64)
    _, first, index = np.unique(key * 256 + code, return_index=True, return_inverse=True)
    if columns.order.any():  # then neighbours of one size may lie near or far
        apart = (index.reshape(-1) * (1 << 20) + columns.stride("tp")) * (1 << 20) + columns.stride("cp")
        _, first, index = np.unique(apart, return_index=True, return_inverse=True)
    return _distinct(job, columns[first], tables, fabric).rows(index.reshape(-1))


def _distinct(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    shape, stack = job.shape, job.stack
    t = columns.tp.astype(np.float64)
    c = columns.cp.astype(np.float64)
    tokens = columns.microbatch * (job.seq_len / c)
    # Each narrower format reaches a smaller share of its peak.
    gains = {"fp8": tables.fp8_gain, "fp4": tables.fp8_gain**2}
    rate = np.array([tables.flops[name] * gains.get(name, 1.0) for name in PRECISIONS])[columns.precision]
    half = np.array([tables.flops["bf16" if name in gains else name] for name in PRECISIONS])[columns.precision]
    width = np.where(columns.precision == PRECISIONS.index("fp32"), 2.0, 1.0)  # 4-byte elements
    q = np.ceil(shape.heads / t) * shape.head_dim
    kv = np.ceil(shape.kv_heads / t) * shape.head_dim
    if isinstance(shape, TracedShape):
        return _traced(job, shape, columns, tables, fabric, (tokens, q, kv, rate, half, width))
    gemm_f, dgrad, wgrad = _linears(job, columns, tables, tokens, q, kv, rate)
    down = np.broadcast_arrays(tokens, float(shape.hidden), np.maximum(1.0, np.ceil(shape.ffn / t)))
    last = gemm_s(tables, *down, 1.0, rate) * (_dense_share(shape) if shape.ffn else 0.0)
    attn_f, attn_b = _attention(job, columns, tables, q, half)
    memory_f, memory_b = _passes(job, columns, tokens, q, kv)
    if (columns.cp > 1).any():
        joined_f, joined_b = context_cost.joined_bytes(job, columns, tokens, q, kv)
        memory_f, memory_b = memory_f + joined_f, memory_b + joined_b
    quantised = np.where(columns.precision >= PRECISIONS.index("fp8"), 6.0 * tokens * (2 * shape.hidden + q), 0.0)
    head = _head(job, columns, tables, fabric, tokens, half)
    tp_f, tp_b = _tp(job, columns, tables, fabric, tokens, gemm_f, dgrad + wgrad)
    cp_f, cp_b = context_cost.traffic_s(job, columns, tables, fabric, tokens, q, kv, attn_f, attn_b)
    ep = _ep(job, columns, fabric, tokens)
    calls = np.where(stack.fused_norm | columns.compile, _CALLS_FUSED, _CALLS_EAGER) + np.where(t > 1, 4, 0)
    calls = calls + context_cost.calls(columns)
    host = calls * tables.host_op_s / stack.host_gain * (0.0 if stack.cuda_graphs else 1.0)
    return LayerCosts(
        gemm_f=gemm_f * width,
        last_f=last * width,
        gemm_b=(dgrad + wgrad) * width,
        wgrad=wgrad * width,
        attn_f=attn_f,
        attn_b=attn_b,
        memory_f=bytes_s(tables, memory_f + quantised) * width + calls * 0.5 * tables.launch_s,
        memory_b=bytes_s(tables, memory_b + 2 * quantised) * width + calls * 0.7 * tables.launch_s,
        tp_f=tp_f,
        tp_b=tp_b,
        cp_f=cp_f,
        cp_b=cp_b,
        ep_f=ep,
        ep_b=ep,
        host_f=host,
        head_gemm=head[0],
        head_memory=head[1],
        head_tp=head[2],
        embed=bytes_s(tables, tokens * shape.hidden * 16.0),
        embed_tp=np.where(t > 1, fabric.ring_s("all_reduce", tokens * shape.hidden * 2, t, columns.tp_stride), 0.0),
    )


def _traced(
    job: Job, shape: TracedShape, columns: Columns, tables: Tables, fabric: Fabric, given: tuple[Array, ...]
) -> LayerCosts:
    """The same for a model that was traced: its own products, attention and passes in the place of formulas."""
    tokens, q, kv, rate, half, width = given
    own = own_cut(job, columns, rate=rate, half=half)
    gemm_f, dgrad, wgrad = products_s(shape, None, own, tables)
    last = np.zeros(len(columns))  # a norm may read what the last product gives: then a replay makes it too
    attn_f, attn_b = attention_s(shape, None, own, tables, job.stack.attn_gain)
    memory_f, memory_b = moved_bytes(shape, None, own)
    if (columns.cp > 1).any():
        cut = context_cost.is_cut(columns)
        pieces = [context_cost.pieces_s(job, columns, tables, q, backward, half) for backward in (False, True)]
        attn_f, attn_b = np.where(cut, pieces[0], attn_f), np.where(cut, pieces[1], attn_b)
        joined_f, joined_b = context_cost.joined_bytes(job, columns, tokens, q, kv)
        memory_f, memory_b = memory_f + joined_f, memory_b + joined_b
    calls = num_calls(shape, columns.compile) + np.where(own.t > 1, 4, 0) + context_cost.calls(columns)
    sums = tensor_traffic(shape, own)
    tp_f, tp_b = _tp(job, columns, tables, fabric, tokens, gemm_f, dgrad + wgrad)
    cp_f, cp_b = context_cost.traffic_s(job, columns, tables, fabric, tokens, q, kv, attn_f, attn_b)
    before, after = (end_s(shape, each, own, tables) for each in (shape.traced.before, shape.traced.after))
    head = _head(job, columns, tables, fabric, tokens, half) if shape.vocab else (0.0, 0.0, 0.0)
    none = np.zeros(len(columns))
    return LayerCosts(
        gemm_f=gemm_f * width,
        last_f=last * width,
        gemm_b=(dgrad + wgrad) * width,
        wgrad=wgrad * width,
        attn_f=attn_f,
        attn_b=attn_b,
        memory_f=bytes_s(tables, memory_f) * width + calls * 0.5 * tables.launch_s,
        memory_b=bytes_s(tables, memory_b) * width + calls * 0.7 * tables.launch_s,
        tp_f=tp_f * sums,
        tp_b=tp_b * sums,
        cp_f=cp_f,
        cp_b=cp_b,
        ep_f=none,
        ep_b=none,
        host_f=calls * tables.host_op_s / job.stack.host_gain,
        head_gemm=head[0] + after[0] * width,
        head_memory=head[1] + after[1] * width,
        head_tp=head[2] + none,
        embed=(before[0] + before[1]) * width,
        embed_tp=np.where(
            (own.t > 1) & (shape.vocab > 0),
            fabric.ring_s("all_reduce", tokens * shape.hidden * 2, own.t, columns.tp_stride),
            0.0,
        ),
    )


def own_cut(job: Job, columns: Columns, rate: Array | None = None, half: Array | None = None) -> Cut:
    """A rank's share of a pass, as a traced model asks for it."""
    t, c = columns.tp.astype(np.float64), columns.cp.astype(np.float64)
    peak = np.ones_like(t)
    return Cut(
        batch=columns.microbatch.astype(np.float64),
        seq=job.seq_len / c,
        t=t,
        c=c,
        between=np.where(columns.sp, t, 1.0),
        fused=columns.compile,
        rate=peak if rate is None else rate,
        half=peak if half is None else half,
    )


def _dense_share(shape: Shape) -> float:
    """Of the layers, those without experts."""
    return (shape.layers - shape.moe_layers) / shape.layers


def _linears(
    job: Job, columns: Columns, tables: Tables, tokens: Array, q: Array, kv: Array, rate: Array
) -> tuple[Array, Array, Array]:
    """Seconds of the layer's matmuls: forward, towards the input, towards the weights."""
    shape, t = job.shape, columns.tp.astype(np.float64)
    ups = 2.0 if shape.gated else 1.0
    h = float(shape.hidden)
    one = np.ones_like(tokens)
    dense_share = _dense_share(shape)
    # Rows: m, n, k, batch, how often in a mean layer.
    parts = [(tokens, h * one, q, one, 1.0), *_inputs(shape, tokens, q, kv)]
    ffn = [(float(shape.ffn), dense_share), (float(shape.shared_ffn), 1 - dense_share)]
    for width, share in ffn:
        if width and share:
            parts += [(tokens, np.ceil(ups * width / t), h * one, one, share)]
            parts += [(tokens, h * one, np.ceil(width / t), one, share)]
    if shape.moe_layers:
        split = one if job.stack.fold_experts else t
        local = np.maximum(1.0, shape.num_experts / columns.ep)
        each = tokens / t * split * shape.top_k / local
        wide = shape.expert_ffn / split
        parts += [(each, ups * wide, h * one, local, 1 - dense_share), (each, h * one, wide, local, 1 - dense_share)]
        parts += [(tokens / t, shape.num_experts * one, h * one, one, 1 - dense_share)]
    m, n, k, batch = (np.stack([part[i] for part in parts]) for i in range(4))
    share = np.array([part[4] for part in parts])[:, None]
    times = gemm_s(tables, np.stack([m, m, n]), np.stack([n, k, k]), np.stack([k, n, m]), batch, rate)
    forward, dgrad, wgrad = (times * share).sum(axis=1)
    return forward, dgrad, wgrad


def _inputs(shape: Shape, tokens: Array, q: Array, kv: Array) -> list[tuple[Array, Array, Array, Array, float]]:
    """Matmuls that make queries, keys and values: one, or by way of latent vectors (DeepSeek-AI 2024, 2405.04434)."""
    one = np.ones_like(tokens)
    h = shape.hidden * one
    if not shape.kv_rank:
        return [(tokens, q + 2 * kv, h, one, 1.0)]
    wide = q * (1 + shape.rope_dim / shape.head_dim)
    down = (shape.q_rank + shape.kv_rank + shape.rope_dim) * one
    queries = (tokens, wide, shape.q_rank * one if shape.q_rank else h, one, 1.0)
    return [(tokens, down, h, one, 1.0), queries, (tokens, 2 * q, shape.kv_rank * one, one, 1.0)]


def _attention(job: Job, columns: Columns, tables: Tables, q: Array, peak: Array) -> tuple[Array, Array]:
    """Seconds of scores, softmax and weighted sum: forward, backward. The mean over full and windowed layers."""
    shape, stack, s = job.shape, job.stack, float(job.seq_len)
    rows = columns.microbatch * s / columns.cp  # queries on this rank
    if not stack.flash:
        return _unfused_attention(job, columns, tables, rows, q, peak)
    forward, backward = np.zeros_like(rows), np.zeros_like(rows)
    cut = context_cost.is_cut(columns)
    for seen, layers in ((s, shape.layers - shape.windowed_layers), (min(shape.window, s), shape.windowed_layers)):
        if not layers:
            continue
        mean = (seen + 128) / 2 if seen == s else seen - seen * seen / (2 * s)
        width = q * (1 + shape.rope_dim / (2 * shape.head_dim))
        flops = 4.0 * rows * mean * width
        share = layers / shape.layers / stack.attn_gain
        pair = [
            flash_s(tables, (2.5 if back else 1.0) * flops, seen, shape.head_dim, back, peak) for back in (False, True)
        ]
        if seen == s and cut.any():
            pair = [
                np.where(cut, context_cost.pieces_s(job, columns, tables, width, back, peak), whole)
                for back, whole in zip((False, True), pair, strict=True)
            ]
        forward, backward = forward + share * pair[0], backward + share * pair[1]
    return forward, backward


def _unfused_attention(
    job: Job, columns: Columns, tables: Tables, rows: Array, q: Array, peak: Array
) -> tuple[Array, Array]:
    shape, s = job.shape, float(job.seq_len)
    heads = q / shape.head_dim * rows / s  # matrices of s x s
    elements = heads * s * s
    products = core_s(tables, 4.0 * elements * shape.head_dim, 4.0 * elements, shape.head_dim, peak)
    # Fused: scale-mask-softmax reads and writes halves, dropout too and a mask. Not fused: passes in fp32 besides.
    forward, backward = (4.0, 6.0) if job.stack.fused_softmax else (20.0, 14.0)
    forward, backward = (forward + 5.0, backward + 5.0) if job.stack.dropout else (forward, backward)
    return products + bytes_s(tables, forward * elements), 2 * products + bytes_s(tables, backward * elements)


def _passes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> tuple[Array, Array]:
    """Bytes that element-wise kernels of a mean layer move: forward, backward."""
    shape, stack = job.shape, job.stack
    h, t = float(shape.hidden), columns.tp.astype(np.float64)
    fused_norm = stack.fused_norm | shape.layer_norm | columns.compile
    fused_mlp = stack.fused_mlp | columns.compile
    outside = np.where(columns.sp, t, 1.0)  # sequence parallel divides what lies between the tensor-parallel parts
    masks = 1.0 if stack.dropout else 0.0
    norm_f, norm_b = np.where(fused_norm, 4.0, 36.0), np.where(fused_norm, 8.0, 90.0)
    between_f = 2 * (norm_f + 6.0 + masks) * h / outside
    between_b = 2 * (norm_b + 6.0 + 5.0 * masks) * h / outside
    if shape.gated:
        act_f, act_b = np.where(fused_mlp, 6.0, 10.0), np.where(fused_mlp, 10.0, 18.0)
    else:
        act_f, act_b = np.where(fused_mlp, 4.0, 8.0), np.where(fused_mlp, 6.0, 12.0)
    rotary = 0.0 if shape.learned_positions else np.where(stack.fused_rope | columns.compile, 4.0, 18.0)
    turned = rotary * (q + kv) + 4.0 * (0.0 if stack.flash else 1.0) * (q + 2 * kv)
    dense = (shape.layers - shape.moe_layers) / shape.layers
    width = dense * shape.ffn / t + (1 - dense) * (shape.top_k * shape.expert_ffn + shape.shared_ffn) / t
    moved = (1 - dense) * 4 * 4.0 * shape.top_k * h / t  # permute and unpermute: each reads and writes
    forward = between_f + act_f * width + turned + moved
    backward = between_b + act_b * width + turned + moved
    return tokens * forward, tokens * backward


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
    """Rows of the embedding table after the stack's padding."""
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
    if not job.stack.overlap_tp:
        # What travels for the input's gradient hides under the matmul of the weight's, and the other way round.
        beside = np.where(columns.sp, 4 * gather, backward) if job.stack.overlap_tp_backward else 0.0
        return forward, backward - np.minimum(beside, gemm_b / tables.overlap_compute) * (2 - tables.overlap_compute)
    # In slices: the first travels alone, the others under the matmul of the slice before.
    slices = np.where(columns.sp, 1.0, 0.0) * (t - 1) / t
    hidden_f = np.minimum(forward, gemm_f / tables.overlap_compute) * slices
    hidden_b = np.minimum(backward, gemm_b / tables.overlap_compute) * slices
    slow = tables.overlap_compute - 1
    return forward - hidden_f * (1 - slow), backward - hidden_b * (1 - slow)


def _ep(job: Job, columns: Columns, fabric: Fabric, tokens: Array) -> Array:
    """Seconds of sending tokens to their experts and back, in a mean layer; backward takes as long."""
    shape, t, e = job.shape, columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    if not shape.moe_layers:
        return np.zeros_like(tokens)
    size = tokens / t * shape.top_k * shape.hidden * 2.0
    folded = job.stack.fold_experts
    travel = 2 * fabric.all_to_all_s(size, e, 1 if folded else columns.tp)
    if not folded:
        travel = travel + 2 * fabric.ring_s("all_gather", size * t, t, columns.tp_stride)
    return travel * shape.moe_layers / shape.layers
