"""Cost of context parallelism in a layer: exposed communication, blockwise attention, merging of results, buffers.

The model follows `parallel/context/modes.py`. With ring and gather, a rank attends to the keys of one rank at a time:
with a causal mask to its own keys, and without a mask to the keys of each of the other c - 1 ranks. Keys that are later
than the queries are skipped. Each block gives an output and a log-sum-exp, which are accumulated in fp32. With Ulysses,
a rank runs one attention over all tokens for a part of the heads.

c is the context-parallel size. `q` and `kv` are the widths (features per token) of queries and of keys on a rank, and
`tokens` is the number of tokens of a microbatch on a rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.machine import Fabric, Tables, flash_s
from weft.planner.space.columns import CP_MODES, Columns, Job

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_RING, _GATHER, _ULYSSES = (CP_MODES.index(name) for name in ("ring", "gather", "ulysses"))
#: Average share of a rank's queries, and of another rank's keys, that take part in a block. With zigzag it is all of
#: one and half of the other, depending on the pair of ranks.
_MET = 0.75
#: Bytes per value of a key's gradient as ranks exchange it.
_SUM_BYTES = 4.0
#: Kernels per block in addition to attention (forward), and kernels that rearrange heads for the Ulysses exchange.
_PIECE_CALLS, _EXCHANGE_CALLS = 10.0, 12.0


def is_sharded(columns: Columns) -> Mask:
    """Return True for plans with blockwise attention (ring or gather)."""
    return (columns.cp > 1) & (columns.cp_mode != _ULYSSES)


def blocks_s(
    job: Job, columns: Columns, tables: Tables, width: Array, backward: bool, peak: Array
) -> NDArray[np.float64]:
    """Return the time (s) of one layer's blockwise attention: causal for a rank's own keys, unmasked for other ranks'.

    A stack with `eager_pieces` takes the log-sum-exp from torch's own FlashAttention 2. On devices newer than Ampere
    that kernel is slower than the one used for full sequences.

    Args:
        width: width of the queries on a rank, scaled so that a pair of query and key needs 4 * width FLOPs in forward.
        peak: peak FLOP/s of attention.
    """
    c = columns.cp.astype(np.float64)
    tokens = job.seq_len / c
    each = (2.5 if backward else 1.0) * 4.0 * columns.microbatch * tokens * width
    own = flash_s(tables, each * (tokens + 128) / 2, tokens, backward, peak)
    # The last ranks attend to all other keys and the first ranks to none. Zigzag gives each rank half of them.
    others = flash_s(tables, each * (job.seq_len - tokens) / 2, tokens, backward, peak, masked=False)
    gain = tables.flash2_gain if job.stack.eager_pieces else 1.0
    return (own + others) / gain + (c - 2).clip(0) * tables.launch_s


def traffic_s(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, tokens: Array, q: Array, kv: Array, attn_f: Array,
    attn_b: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the exposed time (s) of a layer's context-parallel communication (forward, backward).

    Keys and values are sent in half precision, the sums of their gradients in fp32. In a ring, each message overlaps
    with the attention of one step, and the time includes the slowdown of that attention. The last gradients have no
    compute to overlap with. With gather and Ulysses, nothing overlaps.
    """
    c, stride = columns.cp.astype(np.float64), columns.stride("cp")
    keys = 2.0 * tokens * kv * 2.0
    sums = 2.0 * tokens * kv * _SUM_BYTES
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
    """Return the exposed time (s) of `steps` messages, plus the slowdown of compute.

    Each message overlaps with one step of compute.

    Args:
        message, compute: time (s) of one message, and of one step of compute.
    """
    hidden = np.minimum(message, compute)
    return steps * (message - hidden + (tables.overlap_compute - 1) * hidden)


def _sent_kv(job: Job, c: Array, kv: Array) -> Array:
    """Return the width of the keys that Ulysses sends.

    With fewer key heads than ranks, each head is sent to several ranks.
    """
    return np.maximum(kv, c * job.shape.head_dim)


def joined_bytes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> tuple[Array, Array]:
    """Return the bytes that kernels of context parallelism move, without attention itself (forward, backward).

    These kernels merge partial outputs (ring, gather) or rearrange heads (Ulysses). Bytes per value of the queries when
    outputs are merged: the first block is copied into the fp32 sum (6). For every other block, several kernels scale
    the sum (8), convert the block to fp32 (6) and add it (12), or one fused kernel does all three (10). At the end the
    sum is rounded (6). Backward adds the gradients of every block to fp32 sums (10).
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
    """Return the number of kernel calls that context parallelism adds to a layer's forward."""
    more = np.where(is_sharded(columns), _PIECE_CALLS * columns.cp, _EXCHANGE_CALLS)
    return np.where(columns.cp > 1, more, 0.0)


def buffer_bytes(job: Job, columns: Columns, tokens: Array, q: Array, kv: Array) -> Array:
    """Return the bytes of buffers on a rank during backward of one layer's attention, without saved activations.

    Gather: keys and values of all ranks and the sums of their gradients. Ring: received and outgoing keys, values and
    sums. Both: the sum of the queries' gradients. Ulysses: exchanged queries, keys, values and their gradients.
    """
    if not (columns.cp > 1).any():
        return np.zeros(len(columns))
    c = columns.cp.astype(np.float64)
    keys, sums = 4.0 * kv, 2.0 * kv * _SUM_BYTES
    ring, gather = 2 * keys + 3 * sums + 4.0 * q, c * (keys + sums) + sums + 4.0 * q
    ulysses = 4.0 * (q + 2 * _sent_kv(job, c, kv))
    modes = [columns.cp_mode == mode for mode in (_RING, _GATHER, _ULYSSES)]
    return np.where(c > 1, tokens * np.select(modes, [ring, gather, ulysses]), 0.0)
