"""Bytes of a loss that the head gives a few tokens at a time (`parallel/tensor/head_loss.py`), and where it does.

Letters: N tokens of a pass on a rank, V entries of the vocabulary on a rank, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.partitioning import LossChunk
from weft.config.plan import RECOMPUTES, SCHEDULES
from weft.planner.cost.context import buffer_bytes
from weft.planner.cost.layer import padded_vocab, rank_share
from weft.planner.cost.shares import rank_shares, trained_shares
from weft.planner.cost.traced import end_saved_bytes, saved_bytes
from weft.planner.space.columns import PRECISIONS, Columns, Job
from weft.planner.space.shape import TracedShape

Array = NDArray[np.float64]

#: As in `parallel/tensor/head.py`, which loads torch: a test holds them together.
LARGE_LOGITS_BYTES = 2**28
#: Values of a token that the cut loss makes besides its logits: labels, masks, largest logit, sums.
_LABELS = 13.0
#: Bytes in which the runtime adds up.
_SUMS = 4.0


def is_loss_fused(columns: Columns, tokens: Array, vocab: Array) -> NDArray[np.bool_]:
    """Return for each row whether the head gives the loss at once: under tp, and where whole logits would be large.

    Args:
        columns: the plans.
        tokens: of a microbatch on a rank.
        vocab: entries on a rank.
    """
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
    """Return the most bytes that a cut loss makes: gradients of hidden states and weight, and logits of a few tokens.

    Args:
        columns: the plans.
        tokens: of a microbatch on a rank.
        vocab: entries on a rank.
        hidden: width of the hidden state.
        width: bytes of a weight and of an activation. A narrow format is rounded to and multiplied beside its sums.
        device_bytes: memory of a GPU, 0 of a CPU: chunks are those that the head asks `LossChunk` for.
        frozen: the head is not trained, and its weight has no gradient.
    """
    sums = np.maximum(_SUMS, width)
    rows = LossChunk.of_device(device_bytes).rows(tokens, vocab, sums)
    weight = 0.0 if frozen else vocab * hidden
    rounded = np.where(width < sums, width * (rows * vocab + weight), 0.0)
    gathered = np.where(columns.sp, tokens * hidden * width, 0.0)
    made = rows * vocab * sums + rounded + weight * sums
    return made + gathered + tokens * (hidden * width + _LABELS * sums)


# Bytes of activations: what a mean layer saves and needs while its backward runs, and what ends and logits take.

#: Most bytes by logit of a loss that compares a student's logits with a teacher's (tasks/distill/divergence.py): a test
#: measures it.
TWO_LOGITS = 36.0
#: The columns that everything here reads.
OF_LAYER = (
    "tp",
    "cp",
    "cp_mode",
    "sp",
    "microbatch",
    "precision",
    "compile",
    "recompute",
    "recompute_share",
)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of a mean layer and one pass on a rank.

    whole: all that it saves. kept: what recompute leaves of it. beside: buffers while its backward runs. passing: the
    gradients of its activations then, less the activations that they let go.
    """

    whole: Array
    kept: Array
    beside: Array
    passing: Array

    def rows(self, index: NDArray[Any] | slice) -> LayerBytes:
        """Return the bytes of plans, by the kind that each is of."""
        return LayerBytes(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


def layer_bytes(job: Job, columns: Columns) -> LayerBytes:
    """Return the bytes of activations that a mean layer saves, without and with the plan's recompute."""
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
    gathered = np.where(columns.sp & stack.regather_sp, t, 1.0)  # what the matmuls read, kept whole or as a slice
    # Eager steps of RMSNorm keep two values in fp32 beside a half-precision input, one beside one in fp32.
    norms = np.where(stack.fused_norm | shape.layer_norm | columns.compile, 0.0, np.where(fp32, 2.0, 6.0))
    if job.adapter is not None:  # what is normalised is kept for the gradient of the norm's weight alone
        norms = np.maximum(0.0, norms - np.where(fp32, 2.0, 4.0))
    masks = 2.0 if stack.dropout else 0.0
    outside = (2 * 2.0 + norms * 2 + masks) * h / between + _normed_bytes(job, columns, fp32, gathered)
    core = 2.0 * q + 4.0 * kv
    product = 2.0 * q + 4.0 * np.ceil(shape.heads / t) * (1.0 if stack.flash else 0.0)
    scores = _score_bytes(job, t)
    narrow = np.where(stack.fp8_inputs & columns.narrow, 1.0, 0.0)
    # Inputs of products in fp8: what q, k, v and the ups read is half as wide; attention keeps its own output beside.
    outside = outside - narrow * 2 * h / gathered
    core = core + narrow * q
    ffn, product_up = _ffn_bytes(job, columns, t, narrow)
    whole = outside + core + product + scores + ffn
    if stack.selective_half:
        routed = shape.moe_share * shape.top_k * 4.0 * h / t
        selective = 2.0 * h / between + core / 2 + product + 2.0 * h / between + product_up + routed
    else:  # all products but the last one, whose output is the layer's own; that of attention before ranks add it up
        selective = 2.0 * h / between + core + product + 2.0 * h + _selective_ffn_bytes(job, columns, t)
    left = {"none": whole, "full": 2.0 * h / between, "attention": whole - scores, "selective": selective}
    kept = np.choose(columns.recompute, [left[name] for name in RECOMPUTES])
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    beside = buffer_bytes(job, columns, tokens, q, kv) + _unpacking_bytes(job, t, width)
    # Of the residual stream and of the products that go up, which are the widest.
    passing = 2.0 * h + (2.0 if shape.gated else 1.0) * product_up
    whole, kept, passing = (tokens * each * width for each in (whole, kept, passing))
    return LayerBytes(whole=whole, kept=kept, beside=beside, passing=passing)


def _unpacking_bytes(job: Job, t: Array, width: Array) -> Array:
    """Bytes that unpacking the largest weight of a packed base takes."""
    return np.zeros_like(t) if job.adapter is None else job.adapter.unpacking_bytes(t, 2.0 * width)


def _traced_bytes(job: Job, shape: TracedShape, columns: Columns, width: Array) -> LayerBytes:
    cut = rank_share(job, columns)
    left = [saved_bytes(shape, cut, name) for name in RECOMPUTES]
    kept = np.choose(columns.recompute, left)
    whole = left[RECOMPUTES.index("none")]
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    q, kv = shape.sharded_widths(cut.t)
    beside = buffer_bytes(job, columns, cut.batch * cut.seq, q, kv) + _unpacking_bytes(job, cut.t, width)
    # Of a traced model nobody knows them: as much as a layer keeps.
    return LayerBytes(whole=whole * width, kept=kept * width, beside=beside, passing=kept * width)


def end_bytes(job: Job, columns: Columns, embedding: bool, head: bool) -> Array:
    """Return the bytes that one pass keeps before and after the layers, where they are known.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        embedding: whether the rank holds the embedding.
        head: whether it holds the head.
    """
    found = np.zeros(len(columns))
    if isinstance(job.shape, TracedShape):
        cut, traced = rank_share(job, columns), job.shape.traced
        for there, layer in ((embedding, traced.before), (head, traced.after)):
            found = found + (end_saved_bytes(layer, cut) if there else 0.0)
    return found


def _score_bytes(job: Job, t: Array) -> Array:
    """Bytes per token of attention's scores where they are kept: softmax, and dropout's mask and product."""
    if job.stack.flash:
        return np.zeros_like(t)
    each = (2.0 if job.stack.fused_softmax else 8.0) + (3.0 if job.stack.dropout else 0.0)
    return each * np.ceil(job.shape.heads / t) * job.seq_len


def _normed_bytes(job: Job, columns: Columns, fp32: NDArray[np.bool_], gathered: Array) -> Array:
    """Bytes per token of what the two norms of a mean layer give, where it is kept for the products that read it.

    gathered: over how many ranks what such a product reads is divided.
    """
    shape, stack = job.shape, job.stack
    h, moe, compiled = float(shape.hidden), shape.moe_share, columns.compile & stack.lean_graphs
    if not moe or not stack.wide_router:
        return np.where(compiled, 0.0, 2 * 2.0 * h / gathered)
    # Experts read copies of their own; what chooses them reads one in fp32, which under fp32 is the tensor itself.
    # Shared ones, in a compiled block, keep what they gathered.
    router = np.where(fp32, 2.0 * h, 4.0 * h + 4.0 * shape.num_experts) / gathered
    read = np.where(fp32 | (shape.shared_ffn == 0), 0.0, 2.0 * h) / np.where(columns.compile, 1.0, gathered)
    return np.where(compiled, 0.0, 2.0 * h * (2 - moe) / gathered) + moe * (router + read)


def _ffn_bytes(job: Job, columns: Columns, t: Array, narrow: Array) -> tuple[Array, Array]:
    """Bytes per token of the feed-forward part of a mean layer: all, and one product that goes up."""
    shape, stack = job.shape, job.stack
    dense, experts = shape.ffn_widths(t)
    per = np.where(stack.fused_mlp | columns.compile, 6.0, 8.0) if shape.gated else np.full_like(t, 4.0)
    per = per - narrow  # what the down product reads
    lean = np.where(columns.compile & stack.lean_graphs, 4.0 if shape.gated else 2.0, per)
    apart = (8.0 if shape.gated else 4.0) - narrow if stack.opaque_experts and not stack.fused_mlp else per
    routed = shape.moe_share * shape.top_k * 4.0 * shape.hidden / t
    return lean * dense + apart * experts + routed, 2.0 * (dense + experts)


def _selective_ffn_bytes(job: Job, columns: Columns, t: Array) -> Array:
    """Bytes per token of what selective recompute keeps of it: products that go up, and what each expert gives."""
    shape = job.shape
    dense, experts = shape.ffn_widths(t)
    ups = 2.0 if shape.gated else 1.0
    given = shape.moe_share * 2.0 * shape.hidden * (shape.top_k + 1) / t  # by each expert, and all of them together
    seen = ups * 2.0 * experts + given
    return ups * 2.0 * dense + np.where(columns.compile & job.stack.opaque_experts, 0.0, seen)


def logits_bytes(job: Job, columns: Columns, device_bytes: int) -> Array:
    """Return the bytes of a pass's logits and of what is made beside them.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        device_bytes: memory of a GPU; 0 of a CPU.
    """
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    t = columns.tp.astype(np.float64)
    each = np.where(
        job.stack.fused_loss,
        6.0,
        np.where(columns.compile, np.minimum(10.0, job.stack.loss_bytes), job.stack.loss_bytes),
    )
    vocab, h = padded_vocab(job, t) / t, float(job.shape.hidden)
    if job.frozen is not None and job.frozen.whole_logits:
        return tokens * (vocab * t * TWO_LOGITS + 4.0 * h)
    found = tokens * vocab * each
    # Of a traced model nobody knows the loss: one of the user's own gets whole logits.
    if job.stack.cut_loss and not isinstance(job.shape, TracedShape):
        fp32 = columns.in_fp32
        width = np.where(fp32, 4.0, np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, 2.0))
        frozen = job.adapter is not None or (job.trained is not None and not job.trained.head)
        cut = fused_loss_bytes(columns, tokens, vocab, h, width, device_bytes, frozen=frozen)
        found = np.where(is_loss_fused(columns, tokens, vocab), cut, found)
    return found + tokens * 4.0 * h


# Bytes that a rank keeps in its host's memory.


@dataclass(frozen=True, slots=True)
class HostShares:
    """Parameters of the first rank of a pipeline that it steps, and all that it holds, ZeRO's division done; layers."""

    own: Array
    every: Array
    layers: Array

    def rows(self, index: NDArray[Any] | slice) -> HostShares:
        """Return the shares of plans, by the kind that each is of."""
        return HostShares(**{each.name: getattr(self, each.name)[index] for each in fields(self)})


def is_offloaded(columns: Columns) -> bool:
    """Return whether any plan keeps anything in its host's memory."""
    return any(
        share[:1].any() if share.strides == (0,) else share.any()
        for share in (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    )


def host_shares(job: Job, columns: Columns, layers: Array) -> HostShares:
    """Return what the hosts keep if everything is offloaded, as numbers of parameters.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        layers: of the rank.
    """
    held = rank_shares(job, columns, layers, True, False)
    trained = trained_shares(job, columns, held, layers, (True, False))
    group = np.where(columns.zero >= 1, columns.dp_shard * columns.cp, 1)
    spread = columns.tp if job.stack.fold_experts else 1
    experts = np.where(columns.zero >= 1, np.maximum(1, columns.dp_shard * columns.cp * spread // columns.ep), 1)
    return HostShares(
        own=(trained.dense + trained.ends) / group + trained.experts / experts,
        every=(held.dense + held.ends) / group + held.experts / experts,
        layers=layers,
    )


def host_bytes(job: Job, columns: Columns, shares: HostShares, kept: Array, held: Array) -> Array:
    """Return the bytes that a rank of each plan keeps in its host's memory: states, weights and activations.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        shares: of the rank.
        kept: bytes of a pass's activations in a mean layer.
        held: passes in flight.
    """
    stack, optimizer, params = job.stack, columns.offload_optimizer, columns.offload_params
    states = optimizer * shares.own * (stack.main_bytes + stack.grad_bytes)
    weights = params * shares.every * stack.gather_bytes + params * (1 - optimizer) * shares.own * stack.main_bytes
    found = states + weights
    if columns.offload_activations.any():
        found = found + columns.offload_activations * shares.layers * held * kept
    return found


# The fullest moment of a backward whose gradients stay where they are made: one process, one pass a step.


def fullest_of_backward(
    layers: Array, saved: Array, gradients: Array, ends: Array, *, tied: bool
) -> tuple[Array, Array]:
    """Return the shares of activations and of gradients that are there when both together are most.

    Activations go as gradients come. Most is there while the last layer is at work, with the head's gradient alone, or
    at the first layer, with all gradients but its own and the embedding's.

    Args:
        layers: of the rank.
        saved: bytes that all of them keep for backward.
        gradients: bytes of all gradients.
        ends: bytes of those of embedding and head.
        tied: whether these are one parameter.
    """
    count = np.maximum(1.0, layers)
    head = ends if tied else ends / 2
    late = head + (gradients - ends) * (count - 1) / count
    is_late = saved / count + late > saved + head
    made = np.where(is_late, late, head) / np.maximum(1.0, gradients)
    return np.where(is_late, 1 / count, 1.0), made


# What recorded passes keep: a CUDA graph holds the memory of its activations for good.

#: Passes of a step from which on one between the first and the last is recorded while the last still runs eagerly: it
#: is seen twice in one step (WARM_UPS of train/microbatch/passes/graphed_passes.py).
_EAGER_BESIDE = 4
#: Recordings of a step: of its first pass, of those between, and of its last.
_PLACES = 3


def passes_in_flight(columns: Columns) -> NDArray[np.float64]:
    """Return how many passes' activations are in memory at once, one entry per plan.

    Recordings share their memory, but for passes whose gradients the next pass adds to: under zero=2 over ranks each
    place in a step has its own. While the first steps record, an eager pass lies beside what is recorded.
    """
    apart = (columns.zero == 2) & (columns.dp_shard * columns.cp > 1)
    several = np.where(apart, np.minimum(_PLACES, columns.num_micro), np.where(columns.num_micro < _EAGER_BESIDE, 1, 2))
    return np.where(columns.graphs, several, 1).astype(np.float64)


# How many communicators a rank of Weft's has: one for each set of ranks that something on the device goes over.

Counts = NDArray[np.int64]

_V_SHAPED = tuple(SCHEDULES.index(name) for name in ("zb_v", "dualpipe_v"))
#: A set of ranks as the axes along which they differ; the last five stand for sets that are none of axes alone.
_REPLICATE, _SHARD, _CP, _TP, _PP, _EXPERTS, _BESIDE, _COPIES, _NEIGHBOURS, _ENDS = (1 << bit for bit in range(10))


def axis_groups(job: Job, columns: Columns, end: bool) -> Counts:
    """Return the communicators of a rank over axes of the mesh, one entry per plan.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        end: whether the rank holds the embedding or the head.
    """
    t, p = _used(columns.tp, _TP), _used(columns.pp, _PP)
    r, s, c = _used(columns.dp_replicate, _REPLICATE), _used(columns.dp_shard, _SHARD), _used(columns.cp, _CP)
    none = np.zeros_like(t)
    sets = [
        r | s | c | t | p,  # the norm, and whether a step is taken
        t,
        c,
        s | c,  # gradients and weights
        r,  # gradients between replicas
        r | s,  # samples
        r | s | c,  # tokens
        r | s | c | t,  # of one stage
        np.where(columns.zero == 3, s | c | t, none),  # the norm of what is sharded
    ]
    if (columns.ep > 1).any():
        sets += _expert_sets(columns, (r, s, c, t))
    kv_heads = job.shape.kv_heads
    if kv_heads:  # heads of keys that several ranks of tp hold
        sets.append(np.where(columns.tp > kv_heads, r | s | c | _COPIES, none))
    near = (columns.reshard_within > 1) & (columns.reshard_within < columns.dp_shard)
    sets.append(np.where(near, _NEIGHBOURS, none))
    if end and job.shape.tied:  # the gradient of the weight that the first and the last stage share
        sets.append(np.where(columns.pp > 2, _ENDS, p))
    ordered = np.sort(np.stack(np.broadcast_arrays(*sets)), axis=0)
    return (ordered[0] > 0) + np.count_nonzero(np.diff(ordered, axis=0), axis=0)


def lanes(columns: Columns, rank: Any) -> Counts:
    """Return the lanes of a rank to other stages, one entry per plan.

    Args:
        columns: the plans.
        rank: place in the pipeline; a number, or one for each plan.
    """
    p = columns.pp
    sides = 1 * (rank > 0) + (rank < p - 1)
    # A V goes both ways between neighbours; several stages on a rank, one after another, close the chain to a ring.
    sides = np.where(np.isin(columns.schedule, _V_SHAPED), 2 * sides, np.where(columns.virtual_stages > 1, 2, sides))
    return np.where(p > 1, 2 * sides, 0)


def _used(sizes: Counts, bit: int) -> Counts:
    return np.where(sizes > 1, bit, 0)


def _expert_sets(columns: Columns, bits: tuple[Counts, Counts, Counts, Counts]) -> list[Counts]:
    """The ranks among which experts are divided, those with the same ones, and these in all replicas."""
    r, s, c, t = bits
    e, inner = columns.ep, columns.tp * columns.cp
    borders = [e == columns.tp, e == inner, e == inner * columns.dp_shard]
    among = np.select(borders, [t, c | t, s | c | t], _EXPERTS)
    beside = np.select(borders, [s | c, s, np.zeros_like(s)], _BESIDE)
    return [np.where(e > 1, each, 0) for each in (among, beside, r | beside)]
