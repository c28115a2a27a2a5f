"""Kernels of one layer on one rank: seconds of products and of attention, bytes that the others move, and calls.

Of a decoder's layer by formulas, of a traced model's from its own list. Letters as in layer_cost.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import context_cost
from weft.planner.cost.machine import Tables, bytes_s, core_s, flash_s, gemm_s
from weft.planner.cost.traced_cost import Cut, attention_s, end_s, moved_bytes, num_calls, products_s, tensor_traffic
from weft.planner.space import PRECISIONS, AdapterSize, Columns, Job, Shape, TracedShape

Array = NDArray[np.float64]

#: Calls of kernels by one layer: forward, and backward over forward (autograd's C++ calls cost about as much).
_CALLS_FUSED, _CALLS_EAGER = 22, 40
#: More of them in a layer with experts: router, balance, sort, spread and join (counted in Weft's: 75 in all, eager).
_EXPERT_CALLS_FUSED, _EXPERT_CALLS_EAGER = 20, 35
#: Speed of the first FlashAttention over the second (Dao 2023, arXiv 2307.08691: about half).
_FLASH_1 = 0.55


@dataclass(frozen=True, slots=True)
class OwnCut:
    """What a rank has of a pass: M, q, kv; FLOP/s of products, of what stays in a half format, and of attention; and
    how much wider elements are than halves."""

    tokens: Array
    q: Array
    kv: Array
    rate: Array
    half: Array
    core: Array
    width: Array


def cut_of(job: Job, columns: Columns, tables: Tables) -> OwnCut:
    shape, t = job.shape, columns.tp.astype(np.float64)
    # Each narrower format reaches a smaller share of its peak.
    rows = tables.fp8_row_share if job.stack.row_scales else 1.0
    gains = {"fp8": tables.fp8_gain * rows, "fp4": tables.fp8_gain**2}
    rates = [tables.flops[name] * gains.get(name, 1.0) for name in PRECISIONS]
    halves = [tables.flops["bf16" if name in gains else name] for name in PRECISIONS]
    # Fused attention in fp32 asks no flag for TF32: it splits what it multiplies, to stay exact.
    cores = [tables.flops["fp32"] if name == "tf32" else rate for name, rate in zip(PRECISIONS, halves, strict=True)]
    q, kv = shape.cut_widths(t)
    return OwnCut(
        tokens=columns.microbatch * (job.seq_len / columns.cp.astype(np.float64)),
        q=q,
        kv=kv,
        rate=np.array(rates)[columns.precision],
        half=np.array(halves)[columns.precision],
        core=np.array(cores)[columns.precision],
        width=np.where(columns.in_fp32, 2.0, 1.0),  # 4-byte elements
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """Of one layer: seconds of products (last: as `last_f`) and of attention, bytes that other kernels move, how many
    kernels are called, and collectives over tp beside those of a decoder's layer."""

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
    """Seconds before the layers, and of what comes after them beside head and loss: products, other kernels."""

    embed: Array
    after_gemm: Array | float = 0.0
    after_memory: Array | float = 0.0


def kernels(job: Job, columns: Columns, tables: Tables, cut: OwnCut) -> Kernels:
    """Of a decoder's layer, by formulas."""
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


def beside_adapter(job: Job, adapter: AdapterSize, made: Kernels, tokens: Array, t: Array) -> Kernels:
    """Of a layer with frozen weights: no gradients of these, the adapter's products, and unpacking of a packed base.

    The products are thin: they take the time of the passes over what they read and write (x, the product that they add
    to). A packed weight is unpacked in forward, and again in backward.
    """
    shape = job.shape
    active = (
        shape.moe_shared_params + shape.top_k * shape.expert_params if shape.moe_layers else shape.dense_layer_params
    )
    thin = made.gemm_f * adapter.params / active
    bytes_once = tokens * adapter.width * (0.5 + 0.5 / t) * 4.0
    unpacked = adapter.unpacked_bytes / t
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
    """Of a mean layer where some weights are frozen: without their gradients, or any before the first trained."""
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


def traced_kernels(job: Job, shape: TracedShape, columns: Columns, tables: Tables, cut: OwnCut) -> tuple[Kernels, Ends]:
    """Of a model that was traced: its own products, attention and passes in the place of formulas."""
    own = own_cut(job, columns, rate=cut.rate, half=cut.core)
    gemm_f, dgrad, wgrad = products_s(shape, None, own, tables)
    attn_f, attn_b = attention_s(shape, None, own, tables, attention_gain(job, tables), job.pieces)
    if (columns.cp > 1).any():
        is_cut = context_cost.is_cut(columns)
        pieces = [context_cost.pieces_s(job, columns, tables, cut.q, backward, cut.core) for backward in (False, True)]
        attn_f, attn_b = np.where(is_cut, pieces[0], attn_f), np.where(is_cut, pieces[1], attn_b)
    last = np.zeros(len(columns))  # a norm may read what the last product gives: then a replay makes it too
    calls, sums = num_calls(shape, columns.compile), tensor_traffic(shape, own)
    before, after = (end_s(shape, each, own, tables) for each in (shape.traced.before, shape.traced.after))
    made = Kernels(gemm_f, dgrad, wgrad, last, attn_f, attn_b, *moved_bytes(shape, None, own), calls, sums)
    return made, Ends((before[0] + before[1]) * cut.width, *after)


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


def _products(job: Job, columns: Columns, tables: Tables, cut: OwnCut) -> tuple[Array, Array, Array]:
    """Seconds of the layer's matmuls: forward, towards the input, towards the weights; each in the format it has."""
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


def _linears(job: Job, columns: Columns, tables: Tables, cut: OwnCut, rate: Array) -> tuple[Array, Array, Array]:
    """The same with one rate for all products; but for experts' where they are always of the half format."""
    tokens, q, kv = cut.tokens, cut.q, cut.kv
    shape, t = job.shape, columns.tp.astype(np.float64)
    ups = 2.0 if shape.gated else 1.0
    h = float(shape.hidden)
    one = np.ones_like(tokens)
    dense_share = shape.dense_share
    # Rows: m, n, k, batch, how often in a mean layer.
    parts = [(tokens, h * one, q, one, 1.0), *_inputs(shape, tokens, q, kv)]
    ffn = [(float(shape.ffn), dense_share), (float(shape.shared_ffn), 1 - dense_share)]
    for width, share in ffn:
        if width and share:
            parts += [(tokens, np.ceil(ups * width / t), h * one, one, share)]
            parts += [(tokens, h * one, np.ceil(width / t), one, share)]
    grouped = 0
    if shape.moe_layers:
        split = one if job.stack.fold_experts else t
        local = np.maximum(1.0, shape.num_experts / columns.ep)
        each = tokens / t * split * shape.top_k / local
        wide = shape.expert_ffn / split
        parts += [(each, ups * wide, h * one, local, 1 - dense_share), (each, h * one, wide, local, 1 - dense_share)]
        parts += [(tokens / t, shape.num_experts * one, h * one, one, 1 - dense_share)]
        grouped = len(parts) - 3
    m, n, k, batch = (np.stack([part[i] for part in parts]) for i in range(4))
    share = np.array([part[4] for part in parts])[:, None]
    ramps = np.full((len(parts), 1), tables.gemm_k0)
    rates = np.broadcast_to(rate, (len(parts), len(tokens))).copy()
    if shape.moe_layers:
        ramps[grouped : grouped + 2] = tables.grouped_k0
        if job.stack.half_experts:
            rates[grouped:] = cut.half
    times = gemm_s(tables, np.stack([m, m, n]), np.stack([n, k, k]), np.stack([k, n, m]), batch, rates, ramps)
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
    width = q * (1 + shape.rope_dim / (2 * shape.head_dim))
    for window, layers in ((s, shape.layers - shape.windowed_layers), (min(shape.window, s), shape.windowed_layers)):
        if not layers:
            continue
        share = layers / shape.layers / attention_gain(job, tables)
        pair = [_packed_s(job, tables, window, 4.0 * rows * width, back, peak) for back in (False, True)]
        if window == s and cut.any():  # pieces of ranks are attended to whole, whatever documents they hold
            pair = [
                np.where(cut, context_cost.pieces_s(job, columns, tables, width, back, peak), whole)
                for back, whole in zip((False, True), pair, strict=True)
            ]
        forward, backward = forward + share * pair[0], backward + share * pair[1]
    return forward, backward


def _packed_s(
    job: Job, tables: Tables, window: float, flops: Array, backward: bool, peak: Array
) -> NDArray[np.float64]:
    """Seconds of one call over sequences of documents, of which a query sees its own up to `window` keys back.

    flops: of each key that all queries see.
    """
    found = np.zeros_like(flops)
    for length, share in job.pieces:
        seen = min(window, float(length))
        mean = (seen + 128) / 2 if seen == length else seen - seen * seen / (2 * length)
        work = (2.5 if backward else 1.0) * share * mean * flops
        found = found + flash_s(tables, work, seen, job.shape.head_dim, backward, peak) - tables.launch_s
    return found + tables.launch_s


def attention_gain(job: Job, tables: Tables) -> float:
    """Speed of the stack's attention kernels over those that were made for the device."""
    second = tables.flash2_gain if job.stack.flash_version < 3 else 1.0
    return job.stack.attn_gain * second * (_FLASH_1 if job.stack.flash_version == 1 else 1.0)


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
    again = np.where(columns.compile & stack.lean_graphs, 2.0, 0.0)  # what products read is written once more
    norm_f, norm_b = np.where(fused_norm, 4.0, 36.0), np.where(fused_norm, 8.0, 90.0) + again
    between_f = 2 * (norm_f + 6.0 + masks) * h / outside
    between_b = 2 * (norm_b + 6.0 + 5.0 * masks) * h / outside
    if shape.gated:
        act_f, act_b = np.where(fused_mlp, 6.0, 10.0), np.where(fused_mlp, 10.0, 18.0)
    else:
        act_f, act_b = np.where(fused_mlp, 4.0, 8.0), np.where(fused_mlp, 6.0, 12.0)
    rotary = 0.0 if shape.learned_positions else np.where(stack.fused_rope | columns.compile, 4.0, 18.0)
    turned = rotary * (q + kv) + 4.0 * (0.0 if stack.flash else 1.0) * (q + 2 * kv)
    dense = shape.dense_share
    width = sum(shape.ffn_widths(t))
    moved = (1 - dense) * 4 * 4.0 * shape.top_k * h / t  # permute and unpermute: each reads and writes
    forward = between_f + act_f * width + turned + moved
    backward = between_b + act_b * width + again * shape.ffn_widths(t)[0] + turned + moved
    return tokens * forward, tokens * backward
