"""Bytes of the chunked loss (`parallel/tensor/language_head.py`), activations and host memory; number of communicators.

Letters: N tokens of a microbatch on a rank, V vocabulary entries on a rank, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.partitioning import LossChunk
from weft.config.plan import RECOMPUTES, SCHEDULES
from weft.planner.cost.context import buffer_bytes
from weft.planner.cost.layer import padded_vocab, share_of
from weft.planner.cost.shares import divided, rank_shares, trained_shares
from weft.planner.cost.traced import end_saved_bytes, saved_bytes
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import TracedShape

Array = NDArray[np.float64]

#: Equal to the value in `parallel/tensor/language_head.py`, which is not imported because it needs torch. A test
#: compares them.
LARGE_LOGITS_BYTES = 2**28
#: Values per token that the chunked loss allocates in addition to logits: labels, masks, largest logit, sums.
_LABELS = 13.0
#: Bytes of a value in the dtype in which the runtime accumulates.
_SUMS = 4.0


def is_loss_fused(columns: Columns, tokens: Array, vocab: Array) -> NDArray[np.bool_]:
    """Return True for plans whose head computes the loss directly: under tp, and if full logits would be large."""
    return (columns.tp > 1) | (tokens * vocab * 4 > LARGE_LOGITS_BYTES)


def fused_loss_bytes(
    columns: Columns,
    tokens: Array,
    vocab: Array,
    hidden: float,
    width: Any,
    device_bytes: int = 0,
    *,
    frozen: bool = False,
) -> Array:
    """Return the peak bytes of a chunked loss: gradients of hidden states and of the weight, and logits of one chunk.

    Args:
        tokens, vocab: tokens of a microbatch and vocabulary entries on a rank.
        width: bytes per value of weights and activations. A narrow format needs rounded copies in addition to the
            accumulated values.
        device_bytes: memory of a GPU; 0 for a CPU. It decides the chunk size, as in `LossChunk`.
        frozen: True if the weight has no gradient.
    """
    sums = np.maximum(_SUMS, width)
    rows = LossChunk.of_device(device_bytes).rows(tokens, vocab, sums)
    weight = 0.0 if frozen else vocab * hidden
    rounded = np.where(width < sums, width * (rows * vocab + weight), 0.0)
    gathered = np.where(columns.sp, tokens * hidden * width, 0.0)
    made = rows * vocab * sums + rounded + weight * sums
    return made + gathered + tokens * (hidden * width + _LABELS * sums)


# Bytes of activations: saved by an average layer, needed during its backward, and used by embedding, head and logits.

#: Peak bytes per logit of a loss that compares a student's logits with a teacher's (train/tasks/distill.py), checked by
#: a test.
TWO_LOGITS = 36.0
#: The columns that this part of the module reads.
OF_LAYER = ("tp", "cp", "cp_mode", "sp", "microbatch", "precision", "compile", "recompute", "recompute_share",
            "mlp_tiles")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Activation bytes of an average layer and one microbatch on a rank.

    Attributes:
        whole: bytes that the layer saves without recomputation.
        kept: bytes that the layer saves under the plan's recompute policy.
        beside: buffers during the layer's backward.
        passing: largest gradients of activations that exist together during the layer's backward.
    """

    whole: Array
    kept: Array
    beside: Array
    passing: Array


def layer_bytes(job: Job, columns: Columns) -> LayerBytes:
    """Return the activation bytes of an average layer and one microbatch, with one entry per plan."""
    shape, stack = job.shape, job.stack
    fp32 = columns.in_fp32
    width = np.where(fp32, 2.0, np.where(columns.precision == PRECISIONS.index("fp64"), 4.0, 1.0))
    if isinstance(shape, TracedShape):
        return _traced_bytes(job, shape, columns, width)
    t = columns.tp.astype(np.float64)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    h = float(shape.hidden)
    q, kv = shape.sharded_widths(t)
    between = np.where(columns.sp, t, 1.0)
    gathered = np.where(columns.sp, t, 1.0)  # activations that matmuls read
    # Eager RMSNorm saves two fp32 values in addition to a half-precision input, and one in addition to an fp32 input.
    norms = np.where(stack.fused_norm | shape.layer_norm | columns.compile, 0.0, np.where(fp32, 2.0, 6.0))
    if job.adapter is not None:  # the normalized activations are saved only for the gradient of the norm's weight
        norms = np.maximum(0.0, norms - np.where(fp32, 2.0, 4.0))
    masks = 0.0 if stack.flash else 2.0
    outside = (2 * 2.0 + norms * 2 + masks) * h / between + _normed_bytes(job, columns, fp32, gathered)
    core = 2.0 * q + 4.0 * kv
    product = 2.0 * q + 4.0 * np.ceil(shape.heads / t) * (1.0 if stack.flash else 0.0)
    # Saved attention scores, with dropout's mask and output.
    scores = np.where(stack.flash, 0.0, 5.0 * np.ceil(shape.heads / t) * job.seq_len)
    narrow = np.where(stack.fp8_inputs & columns.narrow, 1.0, 0.0)
    # With fp8 matmul inputs, the inputs of q, k, v and the up projections are half as wide. Attention also keeps its
    # output.
    outside = outside - narrow * 2 * h / gathered
    core = core + narrow * q
    ffn, product_up, tile = _ffn_bytes(job, columns, t, narrow)
    whole = outside + core + product + scores + ffn
    if stack.selective_half:
        routed = shape.moe_share * shape.top_k * 4.0 * h / t
        selective = 2.0 * h / between + core / 2 + product + 2.0 * h / between + product_up + routed
    else:  # all matmul outputs except the layer's own output; attention's output is saved before the all-reduce
        selective = 2.0 * h / between + core + product + 2.0 * h + _selective_ffn_bytes(job, columns, t)
    left = {
        "none": whole,
        "full": stack.residual_bytes * h / between,
        "attention": whole - scores,
        "selective": selective,
    }
    kept = np.choose(columns.recompute, [left[name] for name in RECOMPUTES])
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    unpacking = 0.0 if job.adapter is None else job.adapter.unpacking_bytes(t, 2.0 * width)
    beside = buffer_bytes(job, columns, tokens, q, kv) + unpacking + tokens * tile * width
    # Gradients of the residual stream and of the up projections, which are the largest.
    passing = 2.0 * h + (2.0 if shape.gated else 1.0) * product_up
    whole, kept, passing = (tokens * each * width for each in (whole, kept, passing))
    return LayerBytes(whole=whole, kept=kept, beside=beside, passing=passing)


def _traced_bytes(job: Job, shape: TracedShape, columns: Columns, width: Array) -> LayerBytes:
    cut = share_of(job, columns)
    left = [saved_bytes(shape, cut, name) for name in RECOMPUTES]
    kept = np.choose(columns.recompute, left)
    whole = left[RECOMPUTES.index("none")]
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    unpacking = 0.0 if job.adapter is None else job.adapter.unpacking_bytes(cut.t, 2.0 * width)
    beside = buffer_bytes(job, columns, cut.tokens, cut.q, cut.kv) + unpacking
    # Activation gradients of a traced model are not traced. They are assumed to be as large as a layer's saved bytes.
    return LayerBytes(whole=whole * width, kept=kept * width, beside=beside, passing=kept * width)


def end_bytes(job: Job, columns: Columns, embedding: bool, head: bool) -> Array:
    """Return the bytes that one microbatch saves outside the layers. They are 0 unless the model was traced."""
    found = np.zeros(len(columns))
    if isinstance(job.shape, TracedShape):
        cut, traced = share_of(job, columns), job.shape.traced
        for there, layer in ((embedding, traced.before), (head, traced.after)):
            found = found + (end_saved_bytes(layer, cut) if there else 0.0)
    return found


def _normed_bytes(job: Job, columns: Columns, fp32: NDArray[np.bool_], gathered: Array) -> Array:
    """Return the bytes per token of the saved outputs of an average layer's two norms.

    They are saved for the matmuls that read them. `gathered` is the number of ranks over which these inputs are
    divided.
    """
    shape = job.shape
    h, moe, compiled = float(shape.hidden), shape.moe_share, columns.compile
    if not moe:
        return np.where(compiled, 0.0, 2 * 2.0 * h / gathered)
    # Each expert reads its own copy. The router reads an fp32 copy, which in fp32 training is the tensor itself. Shared
    # experts in a compiled block keep their gathered input.
    router = np.where(fp32, 2.0 * h, 4.0 * h + 4.0 * shape.num_experts) / gathered
    read = np.where(fp32 | (shape.shared_ffn == 0), 0.0, 2.0 * h) / np.where(columns.compile, 1.0, gathered)
    return np.where(compiled, 0.0, 2.0 * h * (2 - moe) / gathered) + moe * (router + read)


def _ffn_bytes(job: Job, columns: Columns, t: Array, narrow: Array) -> tuple[Array, Array, Array]:
    """Return bytes per token of an average layer's feed-forward: saved in total, in one up projection, in one tile.

    The last two are averages over all tokens of a rank. Tiles of MLPs save their input only, which the norm counts.
    """
    shape, stack, tiles = job.shape, job.stack, columns.mlp_tiles
    dense, experts = shape.ffn_widths(t)
    shared = shape.moe_share * shape.shared_ffn / t
    per = np.where(stack.fused | columns.compile, 6.0, 8.0) if shape.gated else np.full_like(t, 4.0)
    per = per - narrow  # the input of the down projection
    lean = np.where(columns.compile, 4.0 if shape.gated else 2.0, per)
    apart = (8.0 if shape.gated else 4.0) - narrow if not stack.fused else per
    routed = shape.moe_share * shape.top_k * 4.0 * shape.hidden / t
    mlp = lean * dense + apart * shared
    tile = np.where(tiles > 1, mlp / tiles + 4.0 * shape.hidden, 0.0)  # with all tiles' outputs, and joined
    product_up = 2.0 * ((dense + shared) / tiles + experts - shared)
    return np.where(tiles > 1, 0.0, mlp) + apart * (experts - shared) + routed, product_up, tile


def _selective_ffn_bytes(job: Job, columns: Columns, t: Array) -> Array:
    """Return the bytes per token that selective recompute saves in the feed-forward: up projections, expert outputs."""
    shape = job.shape
    dense, experts = shape.ffn_widths(t)
    ups = 2.0 if shape.gated else 1.0
    given = shape.moe_share * 2.0 * shape.hidden * (shape.top_k + 1) / t  # output of each expert, and their sum
    seen = ups * 2.0 * experts + given
    return ups * 2.0 * dense + np.where(columns.compile, 0.0, seen)


def logits_bytes(job: Job, columns: Columns, device_bytes: int) -> Array:
    """Return the bytes of a microbatch's logits and of the tensors that the loss computes from them."""
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    t = columns.tp.astype(np.float64)
    each = np.where(columns.compile, np.minimum(10.0, job.stack.loss_bytes), job.stack.loss_bytes)
    vocab, h = padded_vocab(job, t) / t, float(job.shape.hidden)
    if job.frozen is not None and job.frozen.whole_logits:
        return tokens * (vocab * t * TWO_LOGITS + 4.0 * h)
    found = tokens * vocab * each
    # The loss of a traced model is unknown. A user's own loss gets the full logits.
    if job.stack.cut_loss and not isinstance(job.shape, TracedShape):
        fp32 = columns.in_fp32
        width = np.where(fp32, 4.0, np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, 2.0))
        frozen = job.adapter is not None or (job.trained is not None and not job.trained.head)
        cut = fused_loss_bytes(columns, tokens, vocab, h, width, device_bytes, frozen=frozen)
        found = np.where(is_loss_fused(columns, tokens, vocab), cut, found)
    return found + tokens * 4.0 * h


# Host memory of a rank.


@dataclass(frozen=True, slots=True)
class HostShares:
    """Number of parameters of the first pipeline rank after ZeRO's sharding, and its number of layers.

    Attributes:
        own: parameters that the rank's optimizer updates.
        every: all parameters that the rank stores.
        layers: number of layers of the rank.
    """

    own: Array
    every: Array
    layers: Array


def is_offloaded(columns: Columns) -> bool:
    """Return True if any plan offloads anything to host memory."""
    return any(
        share[:1].any() if share.strides == (0,) else share.any()
        for share in (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    )


def host_shares(job: Job, columns: Columns, layers: Array) -> HostShares:
    """Return the parameters of the first pipeline rank in host memory if all are offloaded.

    layers: number of layers of that rank.
    """
    held = rank_shares(job, columns, layers, True, False)
    trained = trained_shares(job, columns, held, layers, (True, False))
    return HostShares(own=divided(columns, trained, 1), every=divided(columns, held, 1), layers=layers)


def host_bytes(job: Job, columns: Columns, shares: HostShares, kept: Array, held: Array) -> Array:
    """Return the host memory (bytes) of a rank for each plan: optimizer states, weights and activations.

    Args:
        kept: activation bytes of one microbatch in an average layer.
        held: number of microbatches in flight.
    """
    stack, optimizer, params = job.stack, columns.offload_optimizer, columns.offload_params
    states = optimizer * shares.own * (stack.main_bytes + stack.grad_bytes)
    weights = params * shares.every * stack.gather_bytes + params * (1 - optimizer) * shares.own * stack.main_bytes
    found = states + weights
    if columns.offload_activations.any():
        found = found + columns.offload_activations * shares.layers * held * kept
    return found


# Peak of a backward whose gradients stay in autograd's tensors: one process, one microbatch per step.


def fullest_of_backward(
    layers: Array, saved: Array, gradients: Array, ends: Array, *, tied: bool
) -> tuple[Array, Array]:
    """Return the shares of activations and of gradients that exist when their total size is largest.

    Backward releases activations and creates gradients. The peak is at the last layer, with only the head's gradient,
    or at the first layer, with all gradients except its own and the embedding's.

    Args:
        layers: number of layers of the rank.
        saved: bytes that all layers save for backward.
        gradients: bytes of all gradients.
        ends: bytes of the gradients of embedding and head.
        tied: True if embedding and head share their weight.
    """
    count = np.maximum(1.0, layers)
    head = ends if tied else ends / 2
    late = head + (gradients - ends) * (count - 1) / count
    is_late = saved / count + late > saved + head
    made = np.where(is_late, late, head) / np.maximum(1.0, gradients)
    return np.where(is_late, 1 / count, 1.0), made


# Memory of captured CUDA graphs: a graph keeps the memory of its activations permanently.

#: With at least this many microbatches per step, a middle one is captured while the last one still runs eagerly: it
#: then runs twice in one step (WARM_UPS of train/step/graphed_passes.py).
_EAGER_BESIDE = 4
#: Graphs captured per step: the first microbatch, the middle ones, and the last.
_PLACES = 3


def passes_in_flight(columns: Columns) -> NDArray[np.float64]:
    """Return the number of microbatches whose activations CUDA graphs keep in memory together; 1 without graphs.

    Graphs share their memory, except with zero=2 over several ranks: the next microbatch adds to the gradients of a
    graph, so that each of the _PLACES graphs has separate memory. While the first steps are captured, an eager
    microbatch uses memory in addition to the graphs.
    """
    apart = (columns.zero == 2) & (columns.dp_shard * columns.cp > 1)
    several = np.where(apart, np.minimum(_PLACES, columns.num_micro), np.where(columns.num_micro < _EAGER_BESIDE, 1, 2))
    return np.where(columns.graphs, several, 1).astype(np.float64)


# Number of a rank's communicators in Weft: one for each set of ranks with device collectives.

Counts = NDArray[np.int64]

_V_SHAPED = tuple(SCHEDULES.index(name) for name in ("zb_v", "dualpipe_v"))
#: A set of ranks, as the axes along which they differ. The last five are for sets that axes alone do not describe.
_REPLICATE, _SHARD, _CP, _TP, _PP, _EXPERTS, _BESIDE, _COPIES, _NEIGHBOURS, _ENDS = (1 << bit for bit in range(10))


def axis_groups(job: Job, columns: Columns, end: bool) -> Counts:
    """Return the number of a rank's communicators over mesh axes, with one entry per plan.

    Args:
        end: True for a rank with the embedding or the head.
    """
    t, p = _used(columns.tp, _TP), _used(columns.pp, _PP)
    r, s, c = _used(columns.dp_replicate, _REPLICATE), _used(columns.dp_shard, _SHARD), _used(columns.cp, _CP)
    none = np.zeros_like(t)
    sets = [
        r | s | c | t | p,  # gradient norm, and the decision to skip a step
        t,
        c,
        s | c,  # gradients and weights
        r,  # gradients between replicas
        r | s,  # number of samples
        r | s | c,  # number of tokens
        r | s | c | t,  # ranks of one stage
        np.where(columns.zero == 3, s | c | t, none),  # norm of sharded gradients
    ]
    if (columns.ep > 1).any():
        sets += _expert_sets(columns, (r, s, c, t))
    kv_heads = job.shape.kv_heads
    if kv_heads:  # key-value heads that several tp ranks share
        sets.append(np.where(columns.tp > kv_heads, r | s | c | _COPIES, none))
    near = (columns.reshard_within > 1) & (columns.reshard_within < columns.dp_shard)
    sets.append(np.where(near, _NEIGHBOURS, none))
    if end and job.shape.tied:  # gradient of the weight that the first and the last stage share
        sets.append(np.where(columns.pp > 2, _ENDS, p))
    ordered = np.sort(np.stack(np.broadcast_arrays(*sets)), axis=0)
    return (ordered[0] > 0) + np.count_nonzero(np.diff(ordered, axis=0), axis=0)


def lanes(columns: Columns, rank: Any) -> Counts:
    """Return the number of a rank's communicators to other stages, one entry per plan."""
    p = columns.pp
    sides = 1 * (rank > 0) + (rank < p - 1)
    # A V schedule sends in both directions between neighbors. With several virtual stages per rank, the chain of ranks
    # becomes a ring.
    sides = np.where(np.isin(columns.schedule, _V_SHAPED), 2 * sides, np.where(columns.virtual_stages > 1, 2, sides))
    return np.where(p > 1, 2 * sides, 0)


def _used(sizes: Counts, bit: int) -> Counts:
    return np.where(sizes > 1, bit, 0)


def _expert_sets(columns: Columns, bits: tuple[Counts, Counts, Counts, Counts]) -> list[Counts]:
    r, s, c, t = bits
    e, inner = columns.ep, columns.tp * columns.cp
    borders = [e == columns.tp, e == inner, e == inner * columns.dp_shard]
    among = np.select(borders, [t, c | t, s | c | t], _EXPERTS)
    beside = np.select(borders, [s | c, s, np.zeros_like(s)], _BESIDE)
    return [np.where(e > 1, each, 0) for each in (among, beside, r | beside)]
