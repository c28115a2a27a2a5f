"""Bytes of one rank by class, on the stage of a pipeline that needs most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.backward_memory import fullest_of_backward
from weft.planner.cost.context_cost import buffer_bytes
from weft.planner.cost.layer_cost import padded_vocab
from weft.planner.cost.layer_kernels import own_cut
from weft.planner.cost.loss_memory import cut_loss_bytes, is_loss_cut
from weft.planner.cost.machine import Tables
from weft.planner.cost.pipeline import Stages, fullest_moment, in_flight
from weft.planner.cost.shares import Shares, rank_shares, second_shares, shares_in_format, trained_shares
from weft.planner.cost.traced_cost import end_saved_bytes, saved_bytes
from weft.planner.space import PRECISIONS, Columns, Job, TracedShape, wire_columns
from weft.spec.plan import RECOMPUTES, RESHARDS
from weft.spec.shares import BUCKETS_UNDER_WAY

Array = NDArray[np.float64]

#: Most bytes by logit of a loss that compares a student's logits with a teacher's (tasks/distill/divergence.py): a test
#: measures it.
TWO_LOGITS = 36.0
_AFTER_FORWARD, _AFTER_STEP = RESHARDS.index("after_forward"), RESHARDS.index("after_step")

CLASSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "communicators",
    "context",
    "reserve",
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


def layer_bytes(job: Job, columns: Columns) -> LayerBytes:
    """Return the bytes of activations that a mean layer saves, without and with the plan's recompute."""
    shape, stack = job.shape, job.stack
    fp32 = columns.precision == PRECISIONS.index("fp32")
    width = np.where(fp32, 2.0, np.where(columns.precision == PRECISIONS.index("fp64"), 4.0, 1.0))
    if isinstance(shape, TracedShape):
        return _traced_bytes(job, shape, columns, width)
    t = columns.tp.astype(np.float64)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    h = float(shape.hidden)
    q, kv = shape.cut_widths(t)
    between = np.where(columns.sp, t, 1.0)
    gathered = np.where(columns.sp & stack.regather_sp, t, 1.0)  # what the matmuls read, kept whole or as a slice
    # Eager steps of RMSNorm keep two values in fp32 beside a half-precision input, one beside one in fp32.
    norms = np.where(stack.fused_norm | shape.layer_norm | columns.compile, 0.0, np.where(fp32, 2.0, 6.0))
    if job.adapter is not None:  # what is normalised is kept for the gradient of the norm's weight alone
        norms = np.maximum(0.0, norms - np.where(fp32, 2.0, 4.0))
    masks = 2.0 if stack.dropout else 0.0
    outside = (2 * 2.0 + norms * 2 + masks) * h / between + 2 * 2.0 * h / gathered
    core = 2.0 * q + 4.0 * kv
    product = 2.0 * q + 4.0 * np.ceil(shape.heads / t) * (1.0 if stack.flash else 0.0)
    scores = _score_bytes(job, t)
    narrow = np.where(stack.fp8_inputs & (columns.precision >= PRECISIONS.index("fp8")), 1.0, 0.0)
    # Inputs of products in fp8: what q, k, v and the ups read is half as wide; attention keeps its own output beside.
    outside = outside - narrow * 2 * h / gathered
    core = core + narrow * q
    ffn, product_up, routed = _ffn_bytes(job, columns, t, narrow)
    whole = outside + core + product + scores + ffn
    if stack.selective_half:
        selective = 2.0 * h / between + core / 2 + product + 2.0 * h / between + product_up + routed
    else:  # all products but the last one, whose output is the layer's own; that of attention before ranks add it up
        ups = 2.0 if shape.gated else 1.0
        selective = 2.0 * h / between + core + product + 2.0 * h + ups * product_up + routed
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
    cut = own_cut(job, columns)
    left = [saved_bytes(shape, cut, name) for name in RECOMPUTES]
    kept = np.choose(columns.recompute, left)
    whole = left[RECOMPUTES.index("none")]
    kept = columns.recompute_share * kept + (1 - columns.recompute_share) * whole
    q, kv = shape.cut_widths(cut.t)
    beside = buffer_bytes(job, columns, cut.batch * cut.seq, q, kv) + _unpacking_bytes(job, cut.t, width)
    # Of a traced model nobody knows them: as much as a layer keeps.
    return LayerBytes(whole=whole * width, kept=kept * width, beside=beside, passing=kept * width)


def _end_bytes(job: Job, columns: Columns, embedding: bool, head: bool) -> Array:
    """Bytes that one pass keeps before and after the layers, where they are known."""
    found = np.zeros(len(columns))
    if isinstance(job.shape, TracedShape):
        cut, traced = own_cut(job, columns), job.shape.traced
        for there, layer in ((embedding, traced.before), (head, traced.after)):
            found = found + (end_saved_bytes(layer, cut) if there else 0.0)
    return found


def _score_bytes(job: Job, t: Array) -> Array:
    """Bytes per token of attention's scores where they are kept: softmax, and dropout's mask and product."""
    if job.stack.flash:
        return np.zeros_like(t)
    each = (2.0 if job.stack.fused_softmax else 8.0) + (3.0 if job.stack.dropout else 0.0)
    return each * np.ceil(job.shape.heads / t) * job.seq_len


def _ffn_bytes(job: Job, columns: Columns, t: Array, narrow: Array) -> tuple[Array, Array, Array]:
    """Bytes per token of the feed-forward part of a mean layer: all, one product that goes up, and what is routed."""
    shape = job.shape
    moe = shape.moe_share
    width = (1 - moe) * shape.ffn / t + moe * (shape.top_k * shape.expert_ffn + shape.shared_ffn) / t
    per = np.where(job.stack.fused_mlp | columns.compile, 6.0, 8.0) if shape.gated else np.full_like(t, 4.0)
    per = per - narrow  # what the down product reads
    routed = moe * shape.top_k * 4.0 * shape.hidden / t
    return per * width + routed, 2.0 * width, routed


def memory_bytes(job: Job, columns: Columns, tables: Tables, stages: Stages, device_bytes: int) -> dict[str, Array]:
    """Bytes by class on the worst of the first, the second and the last rank of the pipeline.

    device_bytes: memory of a GPU, 0 of a CPU.
    """
    piped = columns.pp > 1
    if piped.all() or not piped.any():
        return _fullest(job, columns, tables, stages, device_bytes)
    found = {name: np.empty(len(columns)) for name in CLASSES}
    for rows in (np.flatnonzero(piped), np.flatnonzero(~piped)):
        some = Stages(
            *(np.broadcast_to(each, piped.shape)[rows] for each in (stages.first, stages.middle, stages.last))
        )
        for name, values in _fullest(job, columns[rows], tables, some, device_bytes).items():
            found[name][rows] = values
    return found


def _fullest(job: Job, columns: Columns, tables: Tables, stages: Stages, device_bytes: int) -> dict[str, Array]:
    """The same, of rows that all have a pipeline or all have none."""
    layer, p = layer_bytes(job, columns), columns.pp
    if not len(columns) or p[0] == 1:
        return rank_bytes(job, columns, tables, layer, (stages.middle, 0, True, True), device_bytes)
    places = [(stages.first, 0, True, False), (stages.middle, 1, False, False), (stages.last, p - 1, False, True)]
    candidates = [rank_bytes(job, columns, tables, layer, each, device_bytes) for each in places]
    totals = np.stack([np.sum(list(each.values()), axis=0) for each in candidates])
    totals[1, p == 2] = -1.0  # two stages have no middle
    worst = totals.argmax(axis=0)
    return {name: np.choose(worst, [each[name] for each in candidates]) for name in CLASSES}


def rank_bytes(
    job: Job,
    columns: Columns,
    tables: Tables,
    layer: LayerBytes,
    place: tuple[Array, object, bool, bool],
    device_bytes: int,
) -> dict[str, Array]:
    """Return the bytes by class of one rank, one entry per plan, at its fuller moment: loss or backward.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        tables: constants of the device.
        layer: saved bytes of a mean layer.
        place: layers of the rank, its place in the pipeline, and whether it holds the embedding and the head.
        device_bytes: memory of a GPU; 0 of a CPU.
    """
    layers, rank, embedding, head = place
    shares = rank_shares(job, columns, layers, embedding, head)
    trained = trained_shares(job, columns, shares, layers, (embedding, head))
    offloaded = 1 - columns.offload_activations
    made = (trained.dense + trained.experts + trained.ends) * job.stack.grad_bytes
    held, begun = fullest_moment(columns, rank, layers * layer.kept * offloaded, made)
    if not job.stack.travel_once:  # gradients have a place of their own from the start
        held, begun = in_flight(columns, rank), np.ones(len(columns))
    saved = layers * held * layer.kept
    ends = _end_bytes(job, columns, embedding, head) * held
    budget = np.where(
        columns.activation_budget < 1,
        np.minimum(columns.activation_budget, 1.0) * layers * held * layer.whole,
        columns.activation_budget,
    )
    saved = np.minimum(saved, budget) * offloaded + np.where(offloaded < 1, 2 * layer.kept, 0.0) + ends
    logits = _logits(job, columns, device_bytes) if head else np.zeros(len(columns))
    gathered, reduced = _buffers(job, columns, shares, trained, layers)
    reduced = reduced + layer.beside
    # Two moments: the loss, with its logits; then backward of a layer, with what recompute makes again and gradients
    # on their way.
    kept, again, begun, loose = _while_backward(job, columns, (layer, layers, saved), trained, begun)
    loss, backward = saved + logits + gathered, kept + again + gathered + reduced
    late = backward + loose > loss
    moving = {
        "activations": np.where(late, kept + again, saved),
        "logits": np.where(late, 0.0, logits),
        "buffers": gathered + np.where(late, reduced, 0.0),
    }
    dynamic = np.sum(list(moving.values()), axis=0)
    groups = 1 + (columns.tp > 1) + (columns.pp > 1) + (columns.cp > 1) + (columns.ep > 1)
    groups = groups + (columns.dp_shard > 1) + (columns.dp_replicate > 1)
    states = _states(job, columns, (shares, trained, layers), begun, late)
    states["parameters"] += _second_bytes(job, columns, place)
    return {
        **states,
        **moving,
        "communicators": np.where(columns.world_size > 1, groups, 0) * tables.communicator_gib * 2**30,
        "context": np.full(len(columns), tables.context_gib * 2**30),
        "reserve": states["reserve"] + dynamic * (tables.reserve - 1),
    }


def _while_backward(
    job: Job, columns: Columns, held: tuple[LayerBytes, Array, Array], trained: Shares, begun: Array
) -> tuple[Array, Array, Array, Array]:
    """Bytes of saved activations and of a layer at work at the fullest moment of backward, and gradients by then.

    Those are told by their share and, where they stay loose, by their bytes, which are not there at the loss.

    held: a mean layer, the layers of the rank, what all save. begun: share of a pipeline's gradients.
    """
    layer, layers, saved = held
    loose = stays_loose(columns) & job.stack.travel_once
    followed = layer.whole - layer.kept + layer.passing
    again = followed if job.adapter is not None else np.where(loose, followed, layer.whole)
    if not loose.any():
        return saved, again, begun, np.zeros(len(columns))
    each = np.where(columns.precision == PRECISIONS.index("fp32"), 4.0, job.stack.weight_bytes)
    gradients = (trained.dense + trained.experts + trained.ends) * each
    left, share = fullest_of_backward(layers, saved, gradients, trained.ends * each, tied=job.shape.tied)
    kept, share = np.where(loose, saved * left, saved), np.where(loose, share, begun)
    return kept, again, share, np.where(loose, share * gradients, 0.0)


def _second_bytes(job: Job, columns: Columns, place: tuple[Array, object, bool, bool]) -> Array:
    """Bytes of a second model's weights, which has neither gradients nor states. place: as `rank_bytes` takes it."""
    layers, _, embedding, head = place
    held = second_shares(job, columns, layers, embedding, head)
    if held is None:
        return np.zeros(len(columns))
    group = np.where(columns.zero == 3, columns.dp_shard * columns.cp, 1).astype(np.float64)
    inside = np.maximum(1.0, group * np.where(job.stack.fold_experts, columns.tp, 1) / columns.ep)
    kept = (held.dense + held.ends) / group + held.experts / np.where(columns.zero == 3, inside, 1.0)
    return kept * np.where(columns.precision == PRECISIONS.index("fp32"), 4.0, job.stack.weight_bytes)


def _states(
    job: Job, columns: Columns, of_rank: tuple[Shares, Shares, Array], begun: Array, late: NDArray[np.bool_]
) -> dict[str, Array]:
    """Bytes of parameters, gradients and optimizer states.

    of_rank: all of its parameters, those that are trained, its layers. begun: share of the gradients of a
    pipeline, or of those that stay loose, that are made by then. late: the moment is in backward.
    """
    stack = job.stack
    zero = columns.zero
    shares, trained, layers = of_rank
    t, e = columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    group = (columns.dp_shard * columns.cp).astype(np.float64)
    expert_group = np.maximum(1.0, group * (t if stack.fold_experts else 1.0) / e)
    parameters, gradients, optimizer, carried = (np.zeros(len(columns)) for _ in range(4))
    full32 = columns.precision == PRECISIONS.index("fp32")
    weight = np.where(full32, 4.0, stack.weight_bytes)
    main = np.where(full32, stack.main_bytes - 4.0, stack.main_bytes)
    master = np.minimum(4.0, main)
    shares = shares_in_format(job, columns, shares, layers, weight)
    parts = (
        (shares.dense + shares.ends, trained.dense + trained.ends, group),
        (shares.experts, trained.experts, expert_group),
    )
    for held, count, size in parts[: 2 if job.shape.moe_layers else 1]:
        if job.adapter is not None:  # frozen weights have no masters
            parameters += held * weight / np.where(zero == 3, size, 1.0)
        elif job.trained is not None:
            parameters += (held - count) * weight / np.where(zero == 3, size, 1.0)
        parameters += count * np.where(zero == 3, np.where(full32, 4.0, master) / size, weight)
        each = np.where(
            stack.travel_once & stays_loose(columns), np.where(full32, 4.0, stack.weight_bytes), stack.grad_bytes
        )
        gradients += count * each * _gradient_share(job, columns, begun, size)
        carried += count * wire_columns.state_bytes(columns)
        kept = np.where((zero == 3) & ~full32, main - master, main)
        kept = kept + wire_columns.outer_bytes(columns) + np.where(full32, wire_columns.apart_bytes(columns), 0.0)
        optimizer += count * kept / np.where(zero >= 1, size, 1.0)
    # One mean in place of two: SGD everywhere, Muon for its matrices.
    single = trained.dense + (trained.ends + trained.experts if job.optimizer == "sgd" else 0.0)
    if job.optimizer in ("sgd", "muon"):
        optimizer -= 4.0 * single / np.where(zero >= 1, group, 1.0)
    # Under ZeRO 3 there are none before the first backward of a step, but the allocator keeps their places.
    gone = ((zero == 3) & ~late & (columns.num_micro == 1)) | (stack.travel_once & stays_loose(columns) & ~late)
    return {
        "reserve": np.where(gone, gradients, 0.0),
        "parameters": parameters * (1 - columns.offload_params),
        "gradients": np.where(gone, 0.0, gradients) + carried,
        "optimizer": optimizer * (1 - columns.offload_optimizer),
    }


def stays_loose(columns: Columns) -> NDArray[np.bool_]:
    """Return for each row whether gradients stay where autograd put them, and in its format, until the update."""
    alone = columns.dp_replicate * columns.dp_shard * columns.cp * columns.pp == 1
    return alone & (columns.num_micro == 1) & (columns.offload_optimizer == 0)


def _gradient_share(job: Job, columns: Columns, begun: Array, size: Array) -> Array:
    """Return how often a rank holds the gradients of its parameters at the fullest moment of backward.

    Those of several passes add up before they travel, where they travel once a step: under ZeRO 1 and 2 of Weft's
    runtime, and under ZeRO 3 that lets go after the step, as a pipeline does. Those of one pass leave bucket by bucket.
    Weft's runtime adds them up where autograd puts them, under ZeRO 2 and in a pipeline, and has a place of its own
    beside that: for the rank's part, and without ZeRO for all of them.
    """
    zero, several = columns.zero, columns.num_micro > 1
    once = np.where(zero == 3, columns.reduces_once, job.stack.travel_once)
    is_whole = (zero == 0) | (once & several) | ((zero == 1) & ~np.bool_(job.stack.travel_once))
    found = np.where(is_whole, 1.0, 1 / size)
    if not job.stack.travel_once:
        return found
    piped = columns.pp > 1
    several = several & (zero < 3) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    own = np.where(zero == 0, np.where(piped, 1.0, 0.0), np.where(piped | (zero == 2), 1 / size, 0.0))
    followed = (piped & (zero < 3) & (columns.num_micro > 1)) | stays_loose(columns)
    return np.where(followed, begun, found) + np.where(several, own, 0.0)


def _buffers(job: Job, columns: Columns, shares: Shares, trained: Shares, layers: Array) -> tuple[Array, Array]:
    """Bytes of gathered parameters, and of gradients on their way in backward.

    ZeRO 3 holds the unit at work and the next, or, where it lets go after backward or after the step, all of the rank.
    """
    stack, zero = job.stack, columns.zero
    shares = shares_in_format(job, columns, shares, layers, stack.gather_bytes)
    unit = (shares.dense + shares.experts) / np.maximum(1.0, layers)
    largest = np.maximum(unit, shares.ends)
    every = shares.dense + shares.experts + shares.ends
    moving = (trained.dense + trained.experts) / np.maximum(1.0, layers)
    held = np.where(columns.reshard == _AFTER_FORWARD, unit + largest, every)
    codes = np.where(columns.gather > 0, wire_columns.weight_bytes(columns, largest, 0.0), 0.0)  # of one unit at a time
    held = held + np.where(columns.reshard_within > 0, every / np.maximum(1, columns.reshard_within), 0.0)
    gathered = np.where(zero == 3, stack.gather_bytes * held + codes, np.where(zero > 0, stack.bucket_bytes, 0.0))
    travels = stack.reduce_bytes + wire_columns.copy_bytes(columns, stack.reduce_bytes)
    flat = np.where(zero == 2, travels * moving, 0.0)
    if stack.travel_once:
        learnt = trained.dense + trained.experts + trained.ends
        leaving = np.minimum(BUCKETS_UNDER_WAY * stack.bucket_params + trained.ends, learnt) * travels
        travels_at_once = (columns.num_micro == 1) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
        flat = np.where(travels_at_once, leaving, 0.0)
    reduced = np.where(zero == 3, (2 + travels) * moving, flat)
    return gathered, reduced


def _logits(job: Job, columns: Columns, device_bytes: int) -> Array:
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
        fp32 = columns.precision == PRECISIONS.index("fp32")
        width = np.where(fp32, 4.0, np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, 2.0))
        frozen = job.adapter is not None or (job.trained is not None and not job.trained.head)
        cut = cut_loss_bytes(columns, tokens, vocab, h, width, device_bytes, frozen=frozen)
        found = np.where(is_loss_cut(columns, tokens, vocab), cut, found)
    return found + tokens * 4.0 * h
