"""Bytes of live tensors on a rank of a host, by class, as Weft's decoders save them with unfused kernels.

Values per token that autograd saves in fp32 for single kernels:

    norm        its input, the normalized input, its output, and one number           3 h + 1
    attention   q, k, v and output, and one number for each head                      2 q + 2 kv + heads
    SwiGLU      gate, up, silu and product                                            4 f
    loss        log-softmax, and the gradients of it and of the logits                3 V, in full only at the loss

The peak is at one of three moments: the loss, backward of the last layer, or backward of the first layer. The CPU
allocator has no reserved memory to add.
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
    """Return the bytes by class on the rank with the highest memory use."""
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
    """Return the bytes by class on one rank of the pipeline."""
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
    ends = tokens * (head * norm + (0.0 if shape.learned_positions else 2.0 * shape.head_dim))
    # Moment 1: the loss.
    cut = is_loss_fused(columns, tokens, vocab)
    parts = fused_loss_bytes(columns, tokens, vocab, h, width, frozen=adapter is not None) / width
    logits = head * np.where(cut, parts, tokens * 3 * vocab)
    # Moment 2, backward of the last layer: the head's gradients of a chunked loss, and the layer's recomputed
    # activations; the last norm is already released. Moment 3, backward of the first layer: the other layers have
    # released their activations and hold gradients.
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
    # Encoded weights of the unit that is being gathered, which is the head during the loss.
    codes = wire_columns.weight_bytes(columns, np.where(is_late, unit, head * table), 0.0)
    states["buffers"] = states["buffers"] + np.where((columns.zero == 3) & (columns.gather > 0), codes, 0.0)
    return {
        **states,
        "activations": (saved + ends + np.where(is_late, in_backward, 0.0)) * width,
        "logits": np.where(is_late, 0.0, logits) * width,
    }


def _trained(job: Job, columns: Columns, layers: Array, held: tuple[Array, Array], ends: tuple[Array, Array]) -> Array:
    """Return the number of parameters that a rank trains.

    `held` is (parameters of its layers, of embedding and head). `ends` is (1 for the embedding, 1 for the head).
    """
    part = job.trained
    if job.adapter is not None:
        return job.adapter.params_of_rank(layers, columns.tp.astype(float))
    if part is None:
        return held[0] + held[1]
    return held[0] * np.where(columns.pp > 1, part.most, part.layers) + held[1] * part.of_ends(*ends)


def _frozen_bytes(
    adapter: AdapterSize | None, columns: Columns, held: tuple[Array, Array, Array], width: Array
) -> Array:
    """Return the bytes of frozen weights. `held` is (frozen weights of the rank, weights of its layers, its layers)."""
    params, inside, layers = held
    found = params * width
    if adapter is not None and adapter.packed:
        packed = np.minimum(inside, layers * adapter.packed / columns.tp)
        found = found - packed * (width - adapter.packed_bytes / adapter.packed)
    divided = np.where(columns.zero == 3, columns.dp_shard * columns.cp, 1)
    return found / divided * (1 - columns.offload_params)


def _pending_values(columns: Columns, layers: Array, units: tuple[Array, Array], head: Array) -> tuple[Array, Array]:
    """Return the number of gradient values in communication during backward of the last and of the first layer.

    Gradients of a single microbatch are sent from autograd's tensors, several buckets at a time. ZeRO 3 has the
    gradients of one unit, and also that unit's weights if it keeps them gathered until then.

    `units` is (parameters of a layer, trained parameters of a layer). `head` is the number of trained parameters of the
    head.
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
    # Gathered weights are released unit by unit and are larger than everything else, so the first layer is never the
    # peak.
    return np.where(keeps, weights + unit, 0.0), np.where(keeps, -np.inf, first)


def _layer(job: Job, columns: Columns) -> tuple[Array, Array]:
    """Return the values per token that a layer saves, without and with the plan's recompute policy."""
    shape = job.shape
    t = columns.tp.astype(float)
    h = float(shape.hidden)
    heads, (q, kv) = np.ceil(shape.heads / t), shape.sharded_widths(t)
    outside = np.where(columns.sp, t, 1.0)
    norm = (2 * h + 2) if shape.layer_norm else (3 * h + 1)
    attention = 2 * q + 2 * kv + heads
    # Ulysses saves the output of attention before and after the exchange.
    swapped = (columns.cp > 1) & (columns.cp_mode == CP_MODES.index("ulysses"))
    attention = attention + np.where(swapped, q, 0.0)
    moe = shape.moe_share
    width = ((1 - moe) * shape.ffn + moe * (shape.top_k * shape.expert_ffn + shape.shared_ffn)) / t
    ups = 2.0 if shape.gated else 1.0
    whole: Array = (
        2 * norm / outside + attention + (ups + 2 if shape.gated else 2.0) * width + moe * 4 * shape.top_k * h / t
    )
    selective = h / outside + h + attention + ups * width  # the output of attention is unsharded before the all-reduce
    left = {"none": whole, "full": h / outside, "attention": whole - attention + q, "selective": selective}
    kept = np.select([columns.recompute == RECOMPUTES.index(name) for name in left], list(left.values()))
    budget = np.where(columns.activation_budget < 1, columns.activation_budget * whole, whole)
    return whole, np.minimum(columns.recompute_share * kept + (1 - columns.recompute_share) * whole, budget)


def _states(job: Job, columns: Columns, params: Array, width: Array) -> dict[str, Array]:
    """Return the bytes of parameters and optimizer states.

    `params` is the number of the rank's trained parameters before ZeRO's sharding.
    """
    moments = (job.stack.main_bytes - 4.0) / 4.0  # in fp32 values per parameter: 2, or 1 in bf16
    moments = 1.0 if job.optimizer == "sgd" else moments  # upper bound for Muon: 1 for its matrices, 2 for others
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
    """Return the number of parameters that ZeRO 3 has gathered.

    During the loss it has released all units except the head. In backward it has two units. With other values of
    `reshard` it has all of them.
    """
    lets_go = columns.reshard == RESHARDS.index("after_forward")
    here = np.where(lets_go, np.where(is_late, 2 * unit, head), params)
    second = np.where(columns.reshard_within > 0, params / np.maximum(1, columns.reshard_within), 0.0)
    return np.where(columns.zero == 3, here + second, 0.0)


def _gradients(columns: Columns, params: Array, width: Array, begun: Array) -> tuple[Array, Array]:
    """Return the bytes of gradients in the engine and in autograd's tensors, and the bytes that exist only late.

    Gradients of a single microbatch are sent from autograd's tensors, so that a stage stores only its shard. Gradients
    of several microbatches are accumulated in full, except under ZeRO 3. In a pipeline they are accumulated in
    autograd's tensors, of which a share `begun` exists. With more than one data rank, the engine's buffer is added.

    ZeRO 3 that reduces once per step has full gradients until then. On a single data rank, gradients of a single
    microbatch stay in autograd's tensors until the next step.
    """
    group = (columns.dp_shard * columns.cp).astype(float)
    piped = columns.pp > 1
    several = (columns.num_micro > 1) & ~piped
    stay = stays_unbucketed(columns)
    late = ((columns.zero == 3) & (columns.num_micro == 1)) | stay  # they do not exist at the start of a step
    kept_whole = (columns.zero == 0) | ((columns.zero == 1) & several)
    kept = params / np.where(kept_whole, 1.0, group)
    kept = np.where(piped & (group * columns.dp_replicate == 1), 0.0, kept)
    made = np.where((columns.zero == 2) & several, params, 0.0)
    made = np.where(piped & (columns.zero < 3), params * begun, made)
    made = np.where((columns.zero == 3) & (columns.num_micro > 1) & columns.reduces_once, params, made)
    found = (kept + made) * np.where(stay, width, np.maximum(width, 4.0))
    return np.where(late, 0.0, found), np.where(late, found, 0.0)
