"""Bytes of a rank's weights: parameters, gradients, states of the optimizer, and buffers in which they travel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.shares import Shares, rank_shares, second_shares, shares_in_format, trained_shares
from weft.planner.space import Columns, Job, wire_columns
from weft.spec.plan import RESHARDS
from weft.spec.shares import BUCKETS_UNDER_WAY

Array = NDArray[np.float64]
#: Layers of a rank, its place in the pipeline, and whether it holds the embedding and the head.
Place = tuple[Array, Any, bool, bool]

_AFTER_FORWARD, _AFTER_STEP = RESHARDS.index("after_forward"), RESHARDS.index("after_step")
#: The columns that everything here reads; of num_micro only whether there is more than one pass.
OF_STATES = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "zero",
    "reshard",
    "reshard_within",
    "gather",
    "reduce",
    "compress",
    "sync",
    "sync_fragments",
    "precision",
    "num_micro",
    "offload_optimizer",
    "graphs",
)


def _second_bytes(job: Job, columns: Columns, place: tuple[Array, object, bool, bool]) -> Array:
    """Bytes of a second model's weights, which has neither gradients nor states. place: as `rank_bytes` takes it."""
    layers, _, embedding, head = place
    held = second_shares(job, columns, layers, embedding, head)
    if held is None:
        return np.zeros(len(columns))
    group = np.where(columns.zero == 3, columns.dp_shard * columns.cp, 1).astype(np.float64)
    inside = np.maximum(1.0, group * np.where(job.stack.fold_experts, columns.tp, 1) / columns.ep)
    kept = (held.dense + held.ends) / group + held.experts / np.where(columns.zero == 3, inside, 1.0)
    return kept * np.where(columns.in_fp32, 4.0, job.stack.weight_bytes)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """What a rank holds whatever its activations are, offloads left aside. Bytes but for layers, learnt and ends.

    layers: of the rank. learnt: parameters that are trained; ends: those of them in embedding and head.
    gradients: those that are there at the fullest moment of backward; growing: those beside, times the share that is
    made by then. carried: what senders keep from step to step. goes: whether there are no gradients at the loss; where
    they are loose, none of those that grow. loose: whether gradients of a pass stay where autograd put them. second:
    weights of a second model. gathered: parameters; reduced: gradients on their way in backward.
    """

    layers: Array
    learnt: Array
    ends: Array
    parameters: Array
    optimizer: Array
    gradients: Array
    growing: Array
    carried: Array
    second: Array
    gathered: Array
    reduced: Array
    goes: NDArray[np.bool_]
    loose: NDArray[np.bool_]

    def rows(self, index: NDArray[Any] | slice) -> WeightBytes:
        """Return the bytes of plans, by the kind that each is of. What is nothing for every kind stays one number."""
        nothing: Any = np.zeros((), dtype=np.bool_)
        values: dict[str, NDArray[Any]] = {each.name: getattr(self, each.name) for each in fields(self)}
        return WeightBytes(**{name: value[index] if value.any() else nothing for name, value in values.items()})


def held_bytes(job: Job, columns: Columns, place: Place) -> WeightBytes:
    """Return what the rank at a place of the pipeline holds of weights, one entry per plan.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        place: layers of the rank, its place, and whether it holds the embedding and the head.
    """
    layers, _, embedding, head = place
    stack, zero = job.stack, columns.zero
    shares = rank_shares(job, columns, layers, embedding, head)
    trained = trained_shares(job, columns, shares, layers, (embedding, head))
    gathered, reduced = _buffers(job, columns, shares, trained, layers)
    parameters, optimizer, gradients, growing = _states(job, columns, shares, trained, layers)
    learnt = trained.dense + trained.experts + trained.ends
    loose = (stays_loose(columns) | awaits_pass(columns)) & stack.travel_once
    counted = learnt if job.shape.moe_layers else trained.dense + trained.ends
    return WeightBytes(
        layers=layers,
        learnt=learnt,
        ends=trained.ends,
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        growing=growing,
        carried=counted * wire_columns.state_bytes(columns),
        second=_second_bytes(job, columns, place),
        gathered=gathered,
        reduced=reduced,
        # Under ZeRO 3 there are none before the first backward of a step, but the allocator keeps their places.
        goes=((zero == 3) & (columns.num_micro == 1)) | loose,
        loose=loose,
    )


def loose_width(job: Job, columns: Columns) -> Array:
    """Return the bytes of a gradient that stays where autograd put it, in its format.

    Args:
        job: model, sequence and batch.
        columns: the plans.
    """
    return np.where(columns.in_fp32, 4.0, job.stack.weight_bytes)


def _states(
    job: Job, columns: Columns, shares: Shares, trained: Shares, layers: Array
) -> tuple[Array, Array, Array, Array]:
    """Bytes of parameters, of optimizer states, and of gradients: those that are there, and those that grow."""
    stack, zero = job.stack, columns.zero
    t, e = columns.tp.astype(np.float64), columns.ep.astype(np.float64)
    group = (columns.dp_shard * columns.cp).astype(np.float64)
    expert_group = np.maximum(1.0, group * (t if stack.fold_experts else 1.0) / e)
    parameters, optimizer, gradients, growing = (np.zeros(len(columns)) for _ in range(4))
    full32 = columns.in_fp32
    weight = np.where(full32, 4.0, stack.weight_bytes)
    main = np.where(full32, stack.main_bytes - 4.0, stack.main_bytes)
    master = np.minimum(4.0, main)
    kept = np.where((zero == 3) & ~full32, main - master, main)
    kept = kept + wire_columns.outer_bytes(columns) + np.where(full32, wire_columns.apart_bytes(columns), 0.0)
    is_loose = stack.travel_once & (stays_loose(columns) | awaits_pass(columns))
    each = np.where(is_loose, loose_width(job, columns), stack.grad_bytes)  # of those that grow
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
        share, grows = _gradient_share(job, columns, size)
        gradients += count * stack.grad_bytes * share
        growing += count * each * grows
        optimizer += count * kept / np.where(zero >= 1, size, 1.0)
    # One mean in place of two: SGD everywhere, Muon for its matrices.
    single = trained.dense + (trained.ends + trained.experts if job.optimizer == "sgd" else 0.0)
    if job.optimizer in ("sgd", "muon"):
        optimizer -= 4.0 * single / np.where(zero >= 1, group, 1.0)
    return parameters, optimizer, gradients, growing


def stays_loose(columns: Columns) -> NDArray[np.bool_]:
    """Return for each row whether gradients stay where autograd put them, and in its format, until the update."""
    alone = columns.dp_replicate * columns.dp_shard * columns.cp * columns.pp == 1
    return alone & (columns.num_micro == 1) & (columns.offload_optimizer == 0)


def awaits_pass(columns: Columns) -> NDArray[np.bool_]:
    """Return for each row whether the gradients of a step stay so until its pass is over, and travel then: a graph
    holds no collective."""
    ranks = columns.dp_replicate * columns.dp_shard * columns.cp
    return columns.graphs & (columns.num_micro == 1) & (ranks > 1) & (columns.pp == 1) & (columns.zero < 3)


def _gradient_share(job: Job, columns: Columns, size: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return how often a rank holds the gradients of its parameters, and whether once more as far as they are made.

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
        return found, np.zeros(len(columns), dtype=np.bool_)
    piped = columns.pp > 1
    several = several & (zero < 3) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    own = np.where(zero == 0, np.where(piped, 1.0, 0.0), np.where(piped | (zero == 2), 1 / size, 0.0))
    followed = (piped & (zero < 3) & (columns.num_micro > 1)) | stays_loose(columns)
    return np.where(followed, 0.0, found) + np.where(several, own, 0.0), followed | awaits_pass(columns)


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
