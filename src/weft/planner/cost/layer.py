"""Kernels of one layer on one rank: time of matmuls and attention, bytes moved by other kernels, and kernel calls.

A decoder layer is computed by formulas, a traced model from its recorded list of operations.

Letters: t tensor-parallel size, M tokens of a microbatch on a rank, q and kv widths of queries and keys on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import context as context_cost
from weft.planner.cost.machine import Fabric, Tables, bytes_s, core_s, flash_s, gemm_s
from weft.planner.cost.row_dedupe import RowDeduplicator, taken
from weft.planner.cost.traced import RankShare, attention_s, end_s, moved_bytes, num_calls, products_s, tensor_traffic
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import Shape, TracedShape
from weft.planner.space.trained_part import UNPACKED, AdapterSize

Array = NDArray[np.float64]

#: Kernel calls of one layer's forward. Backward takes about as long on the host (autograd's C++ calls).
_CALLS_FUSED, _CALLS_EAGER = 22, 40
#: Additional calls in a layer with experts: router, balancing, sort, scatter and join (75 in total in Weft, eager).
_EXPERT_CALLS_FUSED, _EXPERT_CALLS_EAGER = 20, 35
#: Kernel calls of an expert layer after the host has read the token counts: all of Weft's calls, which are eager.
_DISPATCH_CALLS = 75
#: Tokens of the most loaded rank relative to the average, if no loss or bias balances the experts of each rank (Fedus
#: et al. 2021, arXiv 2101.03961: a capacity factor of 1.25 drops few tokens).
UNBALANCED = 1.25
#: Measured bytes/s of DeepEP's kernels inside a node (its README, 8 ranks: 153 to 158 GB/s).
_DEEPEP_RATE = 155e9
#: Bytes per value of 2 bytes that eager element-wise kernels move, by kernel; "_f" for forward, "_b" for backward.
EAGER_BYTES = {"norm_f": 36.0, "norm_b": 90.0, "rope_f": 18.0, "rope_b": 18.0, "swiglu_f": 10.0, "swiglu_b": 18.0,
               "add": 6.0}  # fmt: skip
#: Speed of FlashAttention 1 relative to FlashAttention 2 (Dao 2023, arXiv 2307.08691: about half).
_FLASH_1 = 0.55


def share_of(job: Job, columns: Columns, tables: Tables | None = None) -> RankShare:
    """Return a rank's share of a microbatch. Without `tables`, all rates are 1."""
    t, c = columns.tp.astype(np.float64), columns.cp.astype(np.float64)
    q, kv = job.shape.sharded_widths(t)
    rate = half = core = np.ones_like(t)
    if tables is not None:
        # Each narrower format reaches a smaller share of its peak rate.
        rows = tables.fp8_row_share if job.stack.row_scales else 1.0
        gains = {"fp8": tables.fp8_gain * rows, "fp4": tables.fp8_gain**2}
        rates = [tables.flops[name] * gains.get(name, 1.0) for name in PRECISIONS]
        halves = [tables.flops["bf16" if name in gains else name] for name in PRECISIONS]
        # Fused attention in fp32 ignores the TF32 flag. It splits its operands to keep fp32 accuracy.
        pairs = zip(PRECISIONS, halves, strict=True)
        cores = [tables.flops["fp32"] if name == "tf32" else rate for name, rate in pairs]
        rate, half, core = (np.array(each)[columns.precision] for each in (rates, halves, cores))
    return RankShare(
        batch=columns.microbatch.astype(np.float64),
        seq=job.seq_len / c,
        t=t,
        c=c,
        between=np.where(columns.sp, t, 1.0),
        fused=columns.compile,
        q=q,
        kv=kv,
        rate=rate,
        half=half,
        core=core,
        width=np.where(columns.in_fp32, 2.0, 1.0),  # 4-byte elements
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of one layer: time (s) of matmuls and attention, bytes moved by other kernels, and number of calls.

    Names end in _f for forward and _b for backward.

    Attributes:
        dgrad, wgrad: time (s) of the matmuls for input gradients and for weight gradients.
        last: time (s) of the last matmul, as in `LayerCosts.last_f`.
        calls: number of kernel calls in forward.
        sums: tensor-parallel communication relative to a decoder layer's.
    """

    gemm_f: Array
    dgrad: Array
    wgrad: Array
    last: Array
    attn_f: Array
    attn_b: Array
    moved_f: Array
    moved_b: Array
    calls: Array
    sums: Array | float = 1.0


@dataclass(frozen=True, slots=True)
class Ends:
    """Time (s) of the modules before the layers, and of matmuls and other kernels after them, without head and loss."""

    embed: Array
    after_gemm: Array | float = 0.0
    after_memory: Array | float = 0.0


def kernels(job: Job, columns: Columns, tables: Tables, cut: RankShare) -> Kernels:
    """Return the kernels of an average decoder layer, computed by formulas."""
    shape, tokens = job.shape, cut.tokens
    gemm_f, dgrad, wgrad = _products(job, columns, tables, cut)
    m, n, k = np.broadcast_arrays(tokens, float(shape.hidden), np.maximum(1.0, np.ceil(shape.ffn / columns.tp)))
    last = gemm_s(tables, m, n, k, 1.0, cut.rate) * (shape.dense_share if shape.ffn else 0.0)
    attn_f, attn_b = _attention(job, columns, tables, cut.q, cut.core)
    moved_f, moved_b = _passes(job, columns, tokens, cut.q, cut.kv)
    narrow = columns.narrow
    rounded = shape.hidden * (1 + (shape.dense_share if job.stack.half_experts else 1.0)) + cut.q
    quantised = np.where(narrow, 6.0 * tokens * rounded * (1 - job.half), 0.0)
    fused, routed = job.stack.fused_norm | columns.compile, shape.moe_layers / shape.layers
    calls = np.where(fused, _CALLS_FUSED, _CALLS_EAGER) + 0.0
    calls += routed * np.where(fused, _EXPERT_CALLS_FUSED, _EXPERT_CALLS_EAGER)
    return Kernels(gemm_f, dgrad, wgrad, last, attn_f, attn_b, moved_f + quantised, moved_b + 2 * quantised, calls)


def frozen_layer_terms(job: Job, adapter: AdapterSize, made: Kernels, tokens: Array, t: Array, ep: Array) -> Kernels:
    """Return the kernels of a layer with frozen weights and an adapter.

    Frozen weights have no gradients, so `wgrad` is 0. The gradients of the adapter's weights are included in `dgrad`.
    The adapter's matmuls take the time of their FLOPs, at the rate of the layer's matmuls, plus the time to read and
    write their operands (x and the output to which they add). A quantized weight is dequantized in forward and again in
    backward.
    """
    shape = job.shape
    active = (
        shape.moe_shared_params + shape.top_k * shape.expert_params if shape.moe_layers else shape.dense_layer_params
    )
    thin = made.gemm_f * adapter.params / active
    bytes_once = tokens * adapter.width * (0.5 + 0.5 / t) * 4.0
    unpacked = adapter.unpacked_bytes / t
    if shape.moe_layers and not adapter.fused:  # each expert of the rank is dequantized once
        stacked = shape.num_experts * shape.expert_params * (shape.moe_layers / shape.layers)
        unpacked = unpacked + UNPACKED.get(adapter.base, 0.0) * stacked / ep
    return replace(
        made,
        gemm_f=made.gemm_f + thin,
        dgrad=made.dgrad + 2 * thin,
        wgrad=np.zeros_like(made.wgrad),
        moved_f=made.moved_f + bytes_once + unpacked,
        moved_b=made.moved_b + 2 * bytes_once + unpacked,
        calls=made.calls + 4 * adapter.products + adapter.unpack_calls,
    )


def partly_trained(job: Job, made: Kernels) -> Kernels:
    """Return the kernels of an average layer if some weights are frozen.

    Frozen weights have no gradients. There is no backward before the first trained weight.
    """
    part = job.trained
    if part is None:
        return made
    return replace(
        made,
        dgrad=made.dgrad * part.reach,
        wgrad=made.wgrad * part.layers,
        attn_b=made.attn_b * part.reach,
        moved_b=made.moved_b * part.reach,
    )


def traced_kernels(
    job: Job, shape: TracedShape, columns: Columns, tables: Tables, cut: RankShare
) -> tuple[Kernels, Ends]:
    """Return the kernels of a traced model's average layer, and the times of the modules before and after the layers.

    They are computed from the recorded matmuls, attentions and memory-bound kernels.
    """
    gemm_f, dgrad, wgrad = products_s(shape, None, cut, tables)
    attn_f, attn_b = attention_s(shape, None, cut, tables, attention_gain(job, tables), job.segments)
    if (columns.cp > 1).any():
        is_cut = context_cost.is_sharded(columns)
        pieces = [context_cost.blocks_s(job, columns, tables, cut.q, backward, cut.core) for backward in (False, True)]
        attn_f, attn_b = np.where(is_cut, pieces[0], attn_f), np.where(is_cut, pieces[1], attn_b)
    last = np.zeros(len(columns))  # a norm may read the output of the last matmul, which a recomputation then repeats
    calls, sums = num_calls(shape, columns.compile), tensor_traffic(shape, cut)
    before, after = (end_s(shape, each, cut, tables) for each in (shape.traced.before, shape.traced.after))
    made = Kernels(gemm_f, dgrad, wgrad, last, attn_f, attn_b, *moved_bytes(shape, None, cut), calls, sums)
    return made, Ends((before[0] + before[1]) * cut.width, *after)


def _products(job: Job, columns: Columns, tables: Tables, cut: RankShare) -> tuple[Array, Array, Array]:
    times = _linears(job, columns, tables, cut, cut.rate)
    fp8 = columns.precision == PRECISIONS.index("fp8")
    if not fp8.any() or not (job.stack.half_wgrad or job.half):
        return times
    slow = _linears(job, columns, tables, cut, cut.half)
    shares = (job.half, job.half, 1.0 if job.stack.half_wgrad else job.half)
    forward, dgrad, wgrad = (
        np.where(fp8, (1 - share) * fast + share * half, fast)
        for fast, half, share in zip(times, slow, shares, strict=True)
    )
    return forward, dgrad, wgrad


def _linears(job: Job, columns: Columns, tables: Tables, cut: RankShare, rate: Array) -> tuple[Array, Array, Array]:
    """Return the time (s) of an average layer's matmuls (forward, input gradients, weight gradients).

    With `half_experts`, matmuls of experts and of the router have the rate of the half-precision format.

    Args:
        rate: FLOP/s of all other matmuls.
    """
    tokens, q, kv = cut.tokens, cut.q, cut.kv
    shape, t = job.shape, columns.tp.astype(np.float64)
    ups = 2.0 if shape.gated else 1.0
    h = float(shape.hidden)
    one = np.ones_like(tokens)
    dense_share = shape.dense_share
    # Entries: m, n, k, batch, number per average layer.
    parts = [(tokens, h * one, q, one, 1.0), *_inputs(shape, tokens, q, kv)]
    ffn = [(float(shape.ffn), dense_share), (float(shape.shared_ffn), 1 - dense_share)]
    for width, share in ffn:
        if width and share:
            parts += [(tokens, np.ceil(ups * width / t), h * one, one, share)]
            parts += [(tokens, h * one, np.ceil(width / t), one, share)]
    grouped = 0
    if shape.moe_layers:
        local = np.maximum(1.0, shape.num_experts / columns.ep)
        fullest = np.where(columns.ep > 1, 1.0 if job.stack.balanced_experts else UNBALANCED, 1.0)
        each, wide = tokens / t * shape.top_k / local * fullest, shape.expert_ffn * one
        parts += [(each, ups * wide, h * one, local, 1 - dense_share), (each, h * one, wide, local, 1 - dense_share)]
        parts += [(tokens / t, shape.num_experts * one, h * one, one, 1 - dense_share)]
        grouped = len(parts) - 3
    m, n, k, batch = (np.stack([part[i] for part in parts]) for i in range(4))
    share = np.array([part[4] for part in parts])[:, None]
    rates = np.broadcast_to(rate, (len(parts), len(tokens))).copy()
    if shape.moe_layers and job.stack.half_experts:
        rates[grouped:] = cut.half
    if shape.moe_layers and job.stack.torch_grouped:
        rates[grouped:-1] *= tables.grouped_gain  # all but the router
    m3, n3, k3 = np.stack([m, m, n]), np.stack([n, k, k]), np.stack([k, n, m])
    times = gemm_s(tables, m3, n3, k3, batch, rates, widths=(n, k))
    forward, dgrad, wgrad = (times * share).sum(axis=1)
    return forward, dgrad, wgrad


def _inputs(shape: Shape, tokens: Array, q: Array, kv: Array) -> list[tuple[Array, Array, Array, Array, float]]:
    """Return (m, n, k, batch, number per layer) of the matmuls that compute queries, keys and values.

    There is one matmul, or three with latent vectors (DeepSeek-AI 2024, arXiv 2405.04434).
    """
    one = np.ones_like(tokens)
    h = shape.hidden * one
    if not shape.kv_rank:
        return [(tokens, q + 2 * kv, h, one, 1.0)]
    wide = q * (1 + shape.rope_dim / shape.head_dim)
    down = (shape.q_rank + shape.kv_rank + shape.rope_dim) * one
    queries = (tokens, wide, shape.q_rank * one if shape.q_rank else h, one, 1.0)
    return [(tokens, down, h, one, 1.0), queries, (tokens, 2 * q, shape.kv_rank * one, one, 1.0)]


def _attention(job: Job, columns: Columns, tables: Tables, q: Array, peak: Array) -> tuple[Array, Array]:
    shape, stack, s = job.shape, job.stack, float(job.seq_len)
    rows = columns.microbatch * s / columns.cp  # queries on this rank
    if not stack.flash:
        return _unfused_attention(job, columns, tables, rows, q, peak)
    forward, backward = np.zeros_like(rows), np.zeros_like(rows)
    cut = context_cost.is_sharded(columns)
    width = q * (1 + shape.rope_dim / (2 * shape.head_dim))
    for window, layers in ((s, shape.layers - shape.windowed_layers), (min(shape.window, s), shape.windowed_layers)):
        if not layers:
            continue
        share = layers / shape.layers / attention_gain(job, tables)
        pair = [_packed_s(job, tables, window, 4.0 * rows * width, back, peak) for back in (False, True)]
        if window == s and cut.any():  # remote parts are attended to in full
            pair = [
                np.where(cut, context_cost.blocks_s(job, columns, tables, width, back, peak), whole)
                for back, whole in zip((False, True), pair, strict=True)
            ]
        forward, backward = forward + share * pair[0], backward + share * pair[1]
    return forward, backward


def _packed_s(
    job: Job, tables: Tables, window: float, flops: Array, backward: bool, peak: Array
) -> NDArray[np.float64]:
    """Return the time (s) of one attention call over sequences of packed documents.

    A query attends to its own document, up to `window` keys back.

    Args:
        flops: FLOPs in forward if each query attended to one key.
    """
    found = np.zeros_like(flops)
    for length, share in job.segments:
        seen = min(window, float(length))
        mean = (seen + 128) / 2 if seen == length else seen - seen * seen / (2 * length)
        work = (2.5 if backward else 1.0) * share * mean * flops
        found = found + flash_s(tables, work, seen, backward, peak) - tables.launch_s
    return found + tables.launch_s


def attention_gain(job: Job, tables: Tables) -> float:
    """Return the speed of the stack's attention kernel relative to the kernel that is optimized for the device."""
    kernel = job.stack.attention
    return (1.0 if kernel == "best" else tables.flash2_gain) * (_FLASH_1 if kernel == "flash1" else 1.0)


def _unfused_attention(
    job: Job, columns: Columns, tables: Tables, rows: Array, q: Array, peak: Array
) -> tuple[Array, Array]:
    shape, s = job.shape, float(job.seq_len)
    heads = q / shape.head_dim * rows / s  # matrices of s x s
    elements = heads * s * s
    products = core_s(tables, 4.0 * elements * shape.head_dim, 4.0 * elements, shape.head_dim, peak)
    # One kernel scales, masks and normalizes half-precision values (4 bytes forward, 6 backward). Dropout needs 5 more.
    return products + bytes_s(tables, 9.0 * elements), 2 * products + bytes_s(tables, 11.0 * elements)


def _passes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> tuple[Array, Array]:
    """Return the bytes that the element-wise kernels of an average layer move (forward, backward)."""
    shape, stack = job.shape, job.stack
    h, t = float(shape.hidden), columns.tp.astype(np.float64)
    fused_norm = stack.fused_norm | shape.layer_norm | columns.compile
    fused_mlp = stack.fused | columns.compile
    outside = np.where(columns.sp, t, 1.0)  # sequence parallelism divides activations between tensor-parallel regions
    masks = 0.0 if stack.flash else 1.0  # stacks with unfused attention date from models with dropout
    again = np.where(columns.compile, 2.0, 0.0)  # inputs of matmuls are written once more
    eager = EAGER_BYTES
    norm_f, norm_b = np.where(fused_norm, 4.0, eager["norm_f"]), np.where(fused_norm, 8.0, eager["norm_b"]) + again
    between_f = 2 * (norm_f + eager["add"] + masks) * h / outside
    between_b = 2 * (norm_b + eager["add"] + 5.0 * masks) * h / outside
    if shape.gated:
        act_f, act_b = np.where(fused_mlp, 6.0, eager["swiglu_f"]), np.where(fused_mlp, 10.0, eager["swiglu_b"])
    else:
        act_f, act_b = np.where(fused_mlp, 4.0, 8.0), np.where(fused_mlp, 6.0, 12.0)
    rotary = 0.0 if shape.learned_positions else np.where(fused_mlp, 4.0, eager["rope_f"])
    turned = rotary * (q + kv) + 4.0 * (0.0 if stack.flash else 1.0) * (q + 2 * kv)
    dense = shape.dense_share
    width = sum(shape.ffn_widths(t))
    moved = (1 - dense) * 4 * 4.0 * shape.top_k * h / t  # permute and unpermute both read and write
    forward = between_f + act_f * width + turned + moved
    backward = between_b + act_b * width + again * shape.ffn_widths(t)[0] + turned + moved
    return tokens * forward, tokens * backward


# Time (s) of one layer, of the embedding and of the head on one rank, for every distinct sharding.


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Time (s) by part, with one entry per distinct sharding. Layer values are averages over the model's layers.

    Names end in _f for forward and _b for backward. gemm, attn and memory are matmuls, attention, and memory-bound
    kernels.

    Attributes:
        last_f: the part of gemm_f for the matmul that computes the layer's output, in dense layers.
        wgrad: the part of gemm_b for weight gradients.
        tp_f, tp_b, cp_f, cp_b, ep_f, ep_b: exposed communication.
        host_f: host time of a layer's forward; 0 with CUDA graphs.
        head_gemm, head_memory, head_tp: head and loss, and their communication.
        embed, embed_tp: embedding, and its communication.
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


#: The columns that layer costs depend on.
_OF_COSTS = ("tp", "cp", "cp_mode", "ep", "sp", "tp_chunks", "microbatch", "precision", "compile", "graphs", "order")


def of_costs(columns: Columns) -> tuple[str, ...]:
    """Return the columns that layer costs depend on.

    If any plan does not have the default axis order, this includes the sizes of further axes: they decide whether
    neighbors share a scale-up domain.
    """
    return (*_OF_COSTS, "pp", "dp_replicate", "dp_shard") if columns.order.any() else _OF_COSTS


def layer_costs(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    """Return the layer costs of each plan in `columns`. Plans with the same sharding of a layer are computed once."""
    kinds = RowDeduplicator.of(columns, of_costs(columns))
    return taken(distinct_costs(job, kinds.rows, tables, fabric), kinds.index)


def distinct_costs(job: Job, columns: Columns, tables: Tables, fabric: Fabric) -> LayerCosts:
    """Return the layer costs of each plan in `columns`, without deduplication. Reads only the columns of `of_costs`."""
    shape, cut = job.shape, share_of(job, columns, tables)
    tokens, q, kv, half, width = cut.tokens, cut.q, cut.kv, cut.half, cut.width
    t = columns.tp.astype(np.float64)
    if isinstance(shape, TracedShape):
        made, ends = traced_kernels(job, shape, columns, tables, cut)
    else:
        made, ends = kernels(job, columns, tables, cut), Ends(embed=bytes_s(tables, tokens * shape.hidden * 16.0))
    if job.adapter is not None:
        made = frozen_layer_terms(job, job.adapter, made, tokens, t, columns.ep.astype(np.float64))
    made = partly_trained(job, made)
    moved_f, moved_b = made.moved_f, made.moved_b
    if (columns.cp > 1).any():
        joined_f, joined_b = context_cost.joined_bytes(job, columns, tokens, q, kv)
        moved_f, moved_b = moved_f + joined_f, moved_b + joined_b
    head = _head(job, columns, tables, fabric, tokens, half, width) if shape.vocab else (np.zeros_like(tokens),) * 3
    # A frozen head has no weight gradient.
    head_trained = 0.0 if job.adapter is not None else 1.0 if job.trained is None else job.trained.head
    tp_f, tp_b = _tp(job, columns, tables, fabric, tokens * width, made.gemm_f, made.dgrad + made.wgrad)
    cp_f, cp_b = context_cost.traffic_s(job, columns, tables, fabric, tokens * width, q, kv, made.attn_f, made.attn_b)
    ep = _ep(job, columns, tables, fabric, tokens * width, made.gemm_f)
    # Each additional chunk adds a collective and a matmul, four times per layer.
    calls = made.calls + np.where(t > 1, 8 * columns.tp_chunks - 4, 0) + context_cost.calls(columns)
    gathers_table = (t > 1) & (shape.vocab > 0)
    return LayerCosts(
        gemm_f=made.gemm_f,
        last_f=made.last,
        gemm_b=made.dgrad + made.wgrad,
        wgrad=made.wgrad,
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
        host_f=np.where(columns.graphs, 0.0, calls * tables.host_op_s * job.stack.host_ops),
        head_gemm=head[0] * (2 + head_trained) / 3 + ends.after_gemm,
        head_memory=head[1] + ends.after_memory * width,
        head_tp=head[2],
        embed=ends.embed,
        embed_tp=np.where(
            gathers_table, fabric.ring_s("all_reduce", tokens * shape.hidden * 2 * width, t, columns.stride("tp")), 0.0
        ),
    )


def _head(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, peak: Array, width: Array
) -> tuple[Array, Array, Array]:
    shape, t = job.shape, columns.tp.astype(np.float64)
    vocab = padded_vocab(job, t) / t
    h = shape.hidden * np.ones_like(tokens)
    m, n, k = np.stack([tokens, tokens, vocab]), np.stack([vocab, h, h]), np.stack([h, vocab, tokens])
    gemm = gemm_s(tables, m, n, k, 1.0, peak, widths=(vocab, h)).sum(axis=0)
    fused = job.stack.fused | columns.compile
    memory = bytes_s(tables, tokens * vocab * np.where(fused, 20.0, 48.0))
    stride = columns.stride("tp")
    wide = fabric.ring_s("all_reduce", tokens * shape.hidden * 2 * width, t, stride)
    comm = np.where(t > 1, 3 * fabric.ring_s("all_reduce", tokens * 4, t, stride) + wide, 0.0)
    return gemm, memory, comm


def padded_vocab(job: Job, tp: Array) -> Array:
    """Return the number of rows of the embedding table, padded to a multiple of `vocab_multiple` times tp."""
    unit = job.stack.vocab_multiple * tp
    return np.ceil(job.shape.vocab / unit) * unit


def _tp(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, gemm_f: Array, gemm_b: Array
) -> tuple[Array, Array]:
    """Return the exposed time (s) of a layer's tensor-parallel collectives (forward, backward).

    Args:
        tokens: tokens of a microbatch, times the bytes of an element relative to a half-precision format.
    """
    t, stride = columns.tp.astype(np.float64), columns.stride("tp")
    size = tokens * job.shape.hidden * 2.0
    whole = fabric.ring_s("all_reduce", size, t, stride)
    gather = fabric.ring_s("all_gather", size, t, stride)
    forward = np.where(columns.sp, 4 * gather, 2 * whole)
    backward = np.where(columns.sp, 6 * gather, 2 * whole)
    slow = tables.overlap_compute - 1
    under_f, under_b = gemm_f / tables.overlap_compute, gemm_b / tables.overlap_compute
    if not job.stack.overlap_tp:
        hidden_f = hidden_b = np.zeros_like(whole)
        if (columns.tp_chunks > 1).any():
            # All collectives of forward are chunked; in backward only the gathers of row-wise layers. The first chunk
            # is exposed.
            pieces = np.where(columns.sp, columns.tp_chunks, 1).astype(np.float64)
            piece = fabric.ring_s("all_gather", size / pieces, t, stride)
            later, more = (pieces - 1) * piece, np.where(pieces > 1, pieces * piece - gather, 0.0)
            forward, backward = forward + 4 * more, backward + 2 * more
            hidden_f, hidden_b = np.minimum(4 * later, under_f), np.minimum(2 * later, under_b)
        return forward - hidden_f * (2 - tables.overlap_compute), backward - hidden_b * (2 - tables.overlap_compute)
    # In chunks: the first is exposed, each other one overlaps with the matmul of the previous chunk.
    slices = np.where(columns.sp, 1.0, 0.0) * (t - 1) / t
    hidden_f, hidden_b = np.minimum(forward, under_f) * slices, np.minimum(backward, under_b) * slices
    return forward - hidden_f * (1 - slow), backward - hidden_b * (1 - slow)


def _ep(job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, experts: Array) -> Array:
    """Return the exposed time (s) to send tokens to their experts and back, in an average layer's forward.

    Backward takes as long. The stack may overlap a share of the communication with the matmuls of experts. The host
    waits for the token counts before it launches the kernels of the experts, so these launches are exposed too.

    Args:
        tokens: tokens of a microbatch, times the bytes of an element relative to a half-precision format.
        experts: time (s) of the matmuls in forward.
    """
    shape, stack, t, e = job.shape, job.stack, columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    if not shape.moe_layers:
        return np.zeros_like(tokens)
    routed = tokens / t * shape.top_k * shape.hidden
    routed = routed * np.where(e > 1, 1.0 if stack.balanced_experts else UNBALANCED, 1.0)
    copies = shape.top_k if stack.dispatch != "each" else None
    if stack.dispatch == "deepep":
        fabric = replace(fabric, link_rate=min(fabric.link_rate, _DEEPEP_RATE))
    there = np.where(columns.narrow, stack.dispatch_bytes, 2.0)
    moved = sum(fabric.all_to_all_s(routed * width, e, 1, copies) for width in (there, 2.0))
    hidden = np.minimum(stack.overlap_ep * moved, experts)
    waits = np.where(e > 1, _DISPATCH_CALLS * tables.host_op_s, 0.0)
    return (moved - hidden + waits) * shape.moe_layers / shape.layers
