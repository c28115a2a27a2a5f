"""Bytes of live tensors on a rank of a host, by class: what the project's decoders keep when every kernel runs alone.

Counted in values of a token, as autograd of single kernels keeps them in fp32:

    norm        its input, the normalised input, what leaves it, and one number       3 h + 1
    attention   q, k, v and output, and one number for each head                      2 q + 2 kv + heads
    SwiGLU      gate, up, silu and product                                            4 f
    loss        log-softmax, and the gradients of it and of the logits                3 V, whole only for the moment

Three moments are looked at: the loss, and backward of the last and of the first layer. There is no allocator whose
reserve would count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.config.partitioning import BUCKETS_UNDER_WAY, bucket_bytes
from weft.config.plan import RECOMPUTES, RESHARDS
from weft.planner.cost.layer import padded_vocab
from weft.planner.cost.memory import CLASSES, stays_unbucketed
from weft.planner.cost.memory_terms import fused_loss_bytes, is_loss_fused
from weft.planner.cost.pipeline import fullest_moment
from weft.planner.cost.shares import rank_shares
from weft.planner.measured.host_layer import ranks_of
from weft.planner.space import columns as wire_columns
from weft.planner.space.columns import CP_MODES, PRECISIONS, Columns, Job
from weft.planner.space.trained_part import AdapterSize

Array = NDArray[np.float64]


def host_memory(job: Job, columns: Columns) -> dict[str, Array]:
    """Return the bytes by class on the fullest rank."""
    found: dict[str, Array] = {name: np.zeros(len(columns)) for name in CLASSES}
    fullest = np.zeros(len(columns))
    for rank, (rows, layers, embedding, head) in enumerate(ranks_of(job, columns)):
        part = columns[rows]
        if not len(part):
            continue
        bytes_here = _rank(job, part, rank, layers[rows], embedding[rows], head[rows])
        total = np.sum(list(bytes_here.values()), axis=0)
        more = total > fullest[rows]
        fullest[rows] = np.where(more, total, fullest[rows])
        for name, values in bytes_here.items():
            found[name][rows] = np.where(more, values, found[name][rows])
    return found


def _rank(job: Job, columns: Columns, rank: int, layers: Array, embedding: Array, head: Array) -> dict[str, Array]:
    """Bytes by class on one rank of the pipeline."""
    shape = job.shape
    t = columns.tp.astype(float)
    h, vocab = float(shape.hidden), padded_vocab(job, t) / t
    halves = [PRECISIONS.index(name) for name in ("bf16", "fp16", "fp8")]
    width = np.where(np.isin(columns.precision, halves), 2.0, 4.0)
    width = np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, width)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    outside = np.where(columns.sp, t, 1.0)
    whole, kept = _layer(job, columns)
    inside, table = rank_shares(job, columns, layers, False, False), shape.vocab * h / t
    inside = inside.dense + inside.experts
    both = np.minimum(embedding + head, 1.0) if shape.tied else embedding + head
    params = inside + table * both
    adapter = job.adapter
    trained = _trained(job, columns, layers, (inside, table * both), (embedding, head))
    one_pass, learnt = tokens * layers * kept * width, trained * np.maximum(width, 4.0)
    piped = columns.pp > 1
    passes, begun = fullest_moment(columns, rank, one_pass, learnt) if piped.any() else (1.0, np.ones(len(columns)))
    passes = np.where(piped, passes, 1.0)
    saved = tokens * layers * passes * kept
    norm = (3 * h + 1) / outside
    turns = 0.0 if shape.learned_positions else 2.0 * shape.head_dim
    ends = tokens * (head * norm + turns)
    # The loss.
    cut = is_loss_fused(columns, tokens, vocab)
    parts = fused_loss_bytes(columns, tokens, vocab, h, width, frozen=adapter is not None) / width
    logits = head * np.where(cut, parts, tokens * 3 * vocab)
    # Backward of the last layer: the head's gradients of a cut loss, and what the layer makes again; the last norm has
    # let go. Backward of the first layer: the others have let go what they kept, and left gradients.
    ffn = (shape.ffn or shape.top_k * shape.expert_ffn) / t
    working = tokens * (h + (2 if shape.gated else 1) * ffn) - tokens * head * norm
    if adapter is not None and adapter.packed:
        working = working + adapter.unpacking_bytes(t, width) / width
    again = np.where(columns.recompute == RECOMPUTES.index("none"), 0.0, tokens * (whole - h / outside))
    unit = inside / np.maximum(1.0, layers)
    learnt_unit = unit if adapter is None else trained / np.maximum(1.0, layers)
    learnt_head = head * vocab * h * (adapter is None)
    way_last, way_first = _pending_values(columns, layers, (unit, learnt_unit), learnt_head)
    last = again + working + way_last + np.where(cut, learnt_head, 0.0)
    first = again + working + way_first - saved * (1 - 1 / np.maximum(1.0, layers))
    states = _states(job, columns, trained, width)
    if adapter is not None or job.trained is not None:
        beside = params if adapter is not None else params - trained
        states["parameters"] += _frozen_bytes(adapter, columns, (beside, inside, layers), width)
    gradients, made_late = _gradients(columns, trained, width, begun)
    is_first = first + made_late / width > np.maximum(last, logits)
    is_late = is_first | (last > logits)
    in_backward = np.where(is_first, first, last)
    states["gradients"] = gradients + np.where(is_first, made_late, 0.0)
    states["buffers"] = _gathered(columns, params, unit, head * table, is_late) * width
    # Codes of the unit that is being gathered: where the loss is made that is the head.
    codes = wire_columns.weight_bytes(columns, np.where(is_late, unit, head * table), 0.0)
    states["buffers"] = states["buffers"] + np.where((columns.zero == 3) & (columns.gather > 0), codes, 0.0)
    return {
        **states,
        "activations": (saved + ends + np.where(is_late, in_backward, 0.0)) * width,
        "logits": np.where(is_late, 0.0, logits) * width,
    }


def _trained(job: Job, columns: Columns, layers: Array, held: tuple[Array, Array], ends: tuple[Array, Array]) -> Array:
    """Parameters that a rank trains. held: those of its layers and at the ends; ends: 1 where it has them."""
    part = job.trained
    if job.adapter is not None:
        return job.adapter.params_of_rank(layers, columns.tp.astype(float))
    if part is None:
        return held[0] + held[1]
    return held[0] * np.where(columns.pp > 1, part.most, part.layers) + held[1] * part.of_ends(*ends)


def _frozen_bytes(
    adapter: AdapterSize | None, columns: Columns, held: tuple[Array, Array, Array], width: Array
) -> Array:
    """Bytes of weights that are not trained. held: a rank's, all of those in its layers, its layers."""
    params, inside, layers = held
    found = params * width
    if adapter is not None and adapter.packed:
        packed = np.minimum(inside, layers * adapter.packed / columns.tp)
        found = found - packed * (width - adapter.packed_bytes / adapter.packed)
    divided = np.where(columns.zero == 3, columns.dp_shard * columns.cp, 1)
    return found / divided * (1 - columns.offload_params)


def _pending_values(columns: Columns, layers: Array, units: tuple[Array, Array], head: Array) -> tuple[Array, Array]:
    """Values of gradients on their way while backward is in the last layer and in the first.

    units: parameters of a layer, and those of them that are trained. head: of the head that are trained.

    Those of a single pass travel from where autograd put them, some buckets at once. ZeRO 3 has those of a unit, and,
    where it keeps what it gathered until then, that unit's weights.
    """
    one_pass = columns.num_micro == 1
    weights, unit = units
    made = np.minimum(head + np.maximum(0.0, layers - 1) * unit, float(BUCKETS_UNDER_WAY * bucket_bytes("cpu") // 4))
    is_divided = columns.dp_replicate * columns.dp_shard * columns.cp > 1
    by_bucket = (columns.zero < 3) & one_pass & is_divided & (columns.pp == 1)
    lets_go = columns.reshard == RESHARDS.index("after_forward")
    by_unit = (columns.zero == 3) & one_pass
    keeps = by_unit & ~lets_go
    first = np.where(by_bucket, made, np.where(by_unit, unit, 0.0))
    # What was kept is let go unit by unit, and is more than all else: the first layer is never fullest then.
    return np.where(keeps, weights + unit, 0.0), np.where(keeps, -np.inf, first)


def _layer(job: Job, columns: Columns) -> tuple[Array, Array]:
    """Values of a token that a layer keeps: all of them, and what the plan's recompute leaves."""
    shape = job.shape
    t = columns.tp.astype(float)
    h = float(shape.hidden)
    heads, (q, kv) = np.ceil(shape.heads / t), shape.sharded_widths(t)
    outside = np.where(columns.sp, t, 1.0)
    norm = (2 * h + 2) if shape.layer_norm else (3 * h + 1)
    attention = 2 * q + 2 * kv + heads
    # Ulysses keeps the output both as attention gives it and as it is exchanged.
    swapped = (columns.cp > 1) & (columns.cp_mode == CP_MODES.index("ulysses"))
    attention = attention + np.where(swapped, q, 0.0)
    moe = shape.moe_share
    width = ((1 - moe) * shape.ffn + moe * (shape.top_k * shape.expert_ffn + shape.shared_ffn)) / t
    ups = 2.0 if shape.gated else 1.0
    whole: Array = (
        2 * norm / outside + attention + (ups + 2 if shape.gated else 2.0) * width + moe * 4 * shape.top_k * h / t
    )
    selective = h / outside + h + attention + ups * width  # attention's product before ranks add it up is whole
    left = {"none": whole, "full": h / outside, "attention": whole - attention + q, "selective": selective}
    kept = np.select([columns.recompute == RECOMPUTES.index(name) for name in left], list(left.values()))
    budget = np.where(columns.activation_budget < 1, columns.activation_budget * whole, whole)
    return whole, np.minimum(columns.recompute_share * kept + (1 - columns.recompute_share) * whole, budget)


def _states(job: Job, columns: Columns, params: Array, width: Array) -> dict[str, Array]:
    """Bytes of parameters and optimizer states. params: those that the rank trains, before ZeRO divides them."""
    moments = (job.stack.main_bytes - 4.0) / 4.0  # as a share of fp32's for each parameter: 2, or 1 in bf16
    moments = 1.0 if job.optimizer == "sgd" else moments  # Muon's matrices have one, embedding and head two: not less
    group = (columns.dp_shard * columns.cp).astype(float)
    master = np.where(width < 4, 4.0, 0.0)
    main = np.maximum(width, 4.0)
    sharded = columns.zero == 3
    weights = params * np.where(sharded, main / group, width)
    beside = wire_columns.outer_bytes(columns) + np.where(width >= 4, wire_columns.separate_bytes(columns), 0.0)
    each = moments * main + np.where(sharded, 0.0, master) + beside
    states = params * each / np.where(columns.zero >= 1, group, 1.0)
    return {
        "parameters": weights * (1 - columns.offload_params),
        "optimizer": states * (1 - columns.offload_optimizer),
    }


def _gathered(columns: Columns, params: Array, unit: Array, head: Array, is_late: NDArray[np.bool_]) -> Array:
    """Parameters that ZeRO 3 has gathered.

    It has let all units but the head go when the loss is made; in backward two are here. Other ways of `reshard` keep
    all of them.
    """
    lets_go = columns.reshard == RESHARDS.index("after_forward")
    here = np.where(lets_go, np.where(is_late, 2 * unit, head), params)
    second = np.where(columns.reshard_within > 0, params / np.maximum(1, columns.reshard_within), 0.0)
    return np.where(columns.zero == 3, here + second, 0.0)


def _gradients(columns: Columns, params: Array, width: Array, begun: Array) -> tuple[Array, Array]:
    """Bytes of gradients that the engine keeps and that autograd has made; and those that are there late alone.

    Those of a single pass travel from where autograd put them, so a stage keeps its part alone; those of several add
    up whole, but under ZeRO 3. In a pipeline they add up where autograd puts them, and `begun` of them are there;
    beside them is what the engine keeps, where there is more than one data rank. ZeRO 3 that reduces once in a step
    has them whole until then. On a single data rank those of a single pass stay as and where autograd made them,
    until the next step.
    """
    group = (columns.dp_shard * columns.cp).astype(float)
    piped = columns.pp > 1
    several = (columns.num_micro > 1) & ~piped
    stay = stays_unbucketed(columns)
    late = ((columns.zero == 3) & (columns.num_micro == 1)) | stay  # a step begins without
    kept_whole = (columns.zero == 0) | ((columns.zero == 1) & several)
    kept = params / np.where(kept_whole, 1.0, group)
    kept = np.where(piped & (group * columns.dp_replicate == 1), 0.0, kept)
    made = np.where((columns.zero == 2) & several, params, 0.0)
    made = np.where(piped & (columns.zero < 3), params * begun, made)
    made = np.where((columns.zero == 3) & (columns.num_micro > 1) & columns.reduces_once, params, made)
    found = (kept + made) * np.where(stay, width, np.maximum(width, 4.0))
    return np.where(late, 0.0, found), np.where(late, found, 0.0)
