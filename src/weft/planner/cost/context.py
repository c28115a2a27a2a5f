"""What a sequence cut over ranks costs a layer: traffic in the open, attention in pieces, joining them, buffers.

As `parallel/context/ways.py` works. Ring and gather attend to the keys of one rank at a time: to their own as a
triangle, to those of the c - 1 others as rectangles, whose halves that the mask takes away are never computed; each
piece gives an output and a log-sum-exp, which are added up in fp32. Ulysses attends once, to all tokens of some heads.
Letters: c context-parallel size, q and kv widths of queries and of keys on a rank, both for `tokens` of a pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.machine import Fabric, Tables, flash_s
from weft.planner.space.columns import CP_MODES, Columns, Job

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_RING, _GATHER, _ULYSSES = (CP_MODES.index(name) for name in ("ring", "gather", "ulysses"))
#: Of a rank's queries, and of another rank's keys, how much meets the other: zigzag leaves all of one, half of the
#: other, and which is which changes from one rank to the next.
_MET = 0.75
#: Kernels that one piece takes beside attention, forward; and those that pack and unpack the exchange of heads.
_PIECE_CALLS, _EXCHANGE_CALLS = 10.0, 12.0


def is_sharded(columns: Columns) -> Mask:
    """Rows whose attention goes piece by piece."""
    return (columns.cp > 1) & (columns.cp_mode != _ULYSSES)


def blocks_s(
    job: Job, columns: Columns, tables: Tables, width: Array, backward: bool, peak: Array
) -> NDArray[np.float64]:
    """Seconds of attention of one layer in pieces: the own triangle, and rectangles without a mask.

    width: of queries on a rank, as many as their FLOPs count for. torch gives the log-sum-exp that joining needs from
    its own FlashAttention 2 alone, which on devices after Ampere is slower than what whole sequences take there.
    """
    c, head_dim = columns.cp.astype(np.float64), job.shape.head_dim
    tokens = job.seq_len / c
    each = (2.5 if backward else 1.0) * 4.0 * columns.microbatch * tokens * width
    own = flash_s(tables, each * (tokens + 128) / 2, tokens, head_dim, backward, peak)
    # The last ranks see all other keys and the first ones none; zigzag gives each rank half of them.
    others = flash_s(tables, each * (job.seq_len - tokens) / 2, tokens, head_dim, backward, peak, masked=False)
    gain = tables.flash2_gain if job.stack.eager_pieces else 1.0
    return (own + others) / gain + (c - 2).clip(0) * tables.launch_s


def traffic_s(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, q: Array, kv: Array, attn_f: Array,
    attn_b: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Exposed seconds of a layer's context-parallel traffic, and what attention loses to the rest: forward, backward.

    Keys and values travel in half precision, the sums of their gradients in the stack's `cp_sum_bytes`. Of a ring each
    message runs under the attention of one step; the last gradients have nothing left to run under.
    """
    c, stride = columns.cp.astype(np.float64), columns.stride("cp")
    keys = 2.0 * tokens * kv * 2.0
    sums = 2.0 * tokens * kv * job.stack.cp_sum_bytes
    crowd = np.where(stride * c > fabric.domain, 1.0, tables.overlap_comm)
    key_s, sum_s = fabric.send_s(keys, stride), fabric.send_s(sums, stride)
    ring_f = _under(c - 1, key_s * crowd, attn_f / c, tables)
    ring_b = _under(c - 2, (key_s + sum_s) * crowd, attn_b / c, tables)
    ring_b = ring_b + _under(1, key_s * crowd, attn_b / c, tables) + sum_s
    gather_f = fabric.ring_s("all_gather", keys * c, c, stride)
    gather_b = gather_f + fabric.ring_s("reduce_scatter", sums * c, c, stride)
    there = fabric.all_to_all_s(tokens * (q + 2 * _sent_kv(job, c, kv)) * 2.0, c, stride)
    exchange = there + fabric.all_to_all_s(tokens * q * 2.0, c, stride)
    modes = [columns.cp_mode == mode for mode in (_RING, _GATHER, _ULYSSES)]
    forward = np.select(modes, [ring_f, gather_f, exchange])
    backward = np.select(modes, [ring_b, gather_b, exchange])
    return np.where(c > 1, forward, 0.0), np.where(c > 1, backward, 0.0)


def _under(steps: Array | int, message: Array, compute: Array, tables: Tables) -> Array:
    """Seconds that messages take in the open, each beside the compute of one step, and that compute loses to them."""
    hidden = np.minimum(message, compute)
    return steps * (message - hidden + (tables.overlap_compute - 1) * hidden)


def _sent_kv(job: Job, c: Array, kv: Array) -> Array:
    """Width of the keys that Ulysses sends: where they have fewer heads than there are ranks, each goes to several."""
    return np.maximum(kv, c * job.shape.head_dim)


def joined_bytes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> tuple[Array, Array]:
    """Bytes that a layer moves to join its pieces, or to pack and unpack heads: forward, backward.

    By value of the queries: the first piece is copied into the fp32 sum (6), each other scales the sum (8), is
    widened (6) and added (12), and the sum is narrowed (6); one fused kernel scales and adds (10). Backward adds every
    piece's gradients to fp32 sums (10).
    """
    c = columns.cp.astype(np.float64)
    met = _MET * (c - 1)
    forward = q * (12 + (26 if job.stack.eager_pieces else 10) * met) + 2 * kv * 4
    passed = np.where(columns.cp_mode == _RING, 12 * (c - 1), 0.0)
    backward = q * (10 + 10 * (1 + met)) + 2 * kv * (6 + 4 * c + 10 * (1 + met) + passed)
    packed = 12 * (q + 2 * _sent_kv(job, c, kv)) + 8 * q
    cut = is_sharded(columns)
    swapped = np.where((columns.cp > 1) & ~cut, packed, 0.0)
    return tokens * np.where(cut, forward, swapped), tokens * np.where(cut, backward, swapped)


def calls(columns: Columns) -> Array:
    """Calls of kernels that a layer's forward has more."""
    more = np.where(is_sharded(columns), _PIECE_CALLS * columns.cp, _EXCHANGE_CALLS)
    return np.where(columns.cp > 1, more, 0.0)


def buffer_bytes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> Array:
    """Bytes on one rank beside what is saved, while backward of one layer's attention runs.

    Gather: keys and values of all ranks and the sums of their gradients. Ring: those that came and are to come. Both:
    the sum of the queries' gradients. Ulysses: queries, keys, values and their gradients, swapped.
    """
    if not (columns.cp > 1).any():
        return np.zeros(len(columns))
    c = columns.cp.astype(np.float64)
    keys, sums = 4.0 * kv, 2.0 * kv * job.stack.cp_sum_bytes
    ring, gather = 2 * keys + 3 * sums + 4.0 * q, c * (keys + sums) + sums + 4.0 * q
    ulysses = 4.0 * (q + 2 * _sent_kv(job, c, kv))
    modes = [columns.cp_mode == mode for mode in (_RING, _GATHER, _ULYSSES)]
    return np.where(c > 1, tokens * np.select(modes, [ring, gather, ulysses]), 0.0)
