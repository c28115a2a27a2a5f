"""Memory of a rank by class: parameters, gradients, optimizer states, activations, logits, buffers and others."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.config.partitioning import BUCKETS_UNDER_WAY
from weft.config.plan import RESHARDS
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory_terms import (
    OF_LAYER,
    LayerBytes,
    axis_groups,
    end_bytes,
    fullest_of_backward,
    host_bytes,
    host_shares,
    is_offloaded,
    lanes,
    layer_bytes,
    logits_bytes,
    passes_in_flight,
)
from weft.planner.cost.pipeline import OF_FLIGHT, chunks_per_rank, even_layers, fullest_moment, in_flight
from weft.planner.cost.private_draws import factor_bytes, in_largest_draw
from weft.planner.cost.row_dedupe import RowDeduplicator, taken
from weft.planner.cost.shares import (
    Shares,
    divided,
    rank_shares,
    second_shares,
    shares_in_format,
    trained_shares,
    zero_groups,
)
from weft.planner.space import columns as wire_columns
from weft.planner.space.columns import Columns, Job

Array = NDArray[np.float64]
#: (number of layers of a rank, its position in the pipeline, True if it has the embedding, True if it has the head).
Place = tuple[Array, Any, bool, bool]

_AFTER_FORWARD = RESHARDS.index("after_forward")
#: The columns that this module reads. Of num_micro only matters if there is more than one microbatch.
OF_STATES = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "reshard", "reshard_within", "gather", "reduce",
    "compress", "sync", "sync_fragments", "precision", "num_micro", "offload_optimizer", "graphs", "shard_shares",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes on a rank that do not depend on activations, before offloading.

    All fields are bytes except layers, learnt, ends, goes and loose.

    Attributes:
        layers: number of layers of the rank.
        learnt: number of trained parameters.
        ends: number of trained parameters in embedding and head.
        gradients: gradients that exist at the peak of backward.
        growing: gradients that backward creates in addition; multiplied by the share that is computed at the peak.
        carried: compression state that senders keep from step to step.
        second: weights of a second model.
        gathered: gathered parameters.
        reduced: gradients in communication during backward.
        goes: True if there are no gradients while the loss is computed. If `loose`, this applies to `growing` only.
        loose: True if a microbatch's gradients stay in the tensors that autograd created.
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
        """Return one entry per plan, given the index of the entry that applies to each plan.

        A field whose entries are all zero becomes one scalar zero.
        """
        nothing: Any = np.zeros((), dtype=np.bool_)
        values: dict[str, NDArray[Any]] = {each.name: getattr(self, each.name) for each in fields(self)}
        return WeightBytes(**{name: value[index] if value.any() else nothing for name, value in values.items()})


def state_bytes(job: Job, columns: Columns, place: Place) -> WeightBytes:
    """Return the model state bytes of the rank at one pipeline position, with one entry per plan."""
    layers, _, embedding, head = place
    zero = columns.zero
    shares = rank_shares(job, columns, layers, embedding, head)
    trained = trained_shares(job, columns, shares, layers, (embedding, head))
    gathered, reduced = _buffers(job, columns, shares, trained, layers)
    parameters, optimizer, gradients, growing = _states(job, columns, shares, trained, layers)
    learnt = trained.dense + trained.experts + trained.ends
    loose = stays_unbucketed(columns) | awaits_pass(columns)
    second: Any = 0.0
    if (other := second_shares(job, columns, layers, embedding, head)) is not None:  # only weights
        second = divided(columns, other, 3) * unbucketed_width(job, columns)
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
        second=np.zeros(len(columns)) + second,
        gathered=gathered,
        reduced=reduced,
        # Under ZeRO 3 there are no gradients before the first backward of a step, but the allocator keeps their memory.
        goes=((zero == 3) & (columns.num_micro == 1)) | loose,
        loose=loose,
    )


def unbucketed_width(job: Job, columns: Columns) -> Array:
    """Return the bytes per value of gradients that stay in the tensors that autograd created."""
    return np.where(columns.in_fp32, 4.0, job.stack.weight_bytes)


def _states(
    job: Job, columns: Columns, shares: Shares, trained: Shares, layers: Array
) -> tuple[Array, Array, Array, Array]:
    stack, zero = job.stack, columns.zero
    group, expert_group = zero_groups(columns, 0)
    parameters, optimizer, gradients, growing = (np.zeros(len(columns)) for _ in range(4))
    full32 = columns.in_fp32
    weight = np.where(full32, 4.0, stack.weight_bytes)
    main = np.where(full32, stack.main_bytes - 4.0, stack.main_bytes)
    master = np.minimum(4.0, main) if stack.master else weight
    kept = np.where((zero == 3) & ~full32 & stack.master, main - master, main)
    kept = kept + wire_columns.outer_bytes(columns) + np.where(full32, wire_columns.separate_bytes(columns), 0.0)
    is_loose = stays_unbucketed(columns) | awaits_pass(columns)
    each = np.where(is_loose, unbucketed_width(job, columns), stack.grad_bytes)  # created in backward
    shares = shares_in_format(job, columns, shares, layers, weight)
    parameters += shares.ends * (stack.residual_bytes - 2.0) / np.where(zero == 3, group, 1.0)
    parts = (
        (shares.dense + shares.ends, trained.dense + trained.ends, group),
        (shares.experts, trained.experts, expert_group),
    )
    for held, count, size in parts[: 2 if job.shape.moe_layers else 1]:
        if job.adapter is not None:  # frozen weights have no master weights
            parameters += held * weight / np.where(zero == 3, size, 1.0)
        elif job.trained is not None:
            parameters += (held - count) * weight / np.where(zero == 3, size, 1.0)
        parameters += count * np.where(zero == 3, np.where(full32, 4.0, master) / size, weight)
        share, grows = _gradient_share(columns, size)
        gradients += count * stack.grad_bytes * share
        growing += count * each * grows
        optimizer += count * kept / np.where(zero >= 1, size, 1.0)
    # One moment instead of two: SGD for all parameters, Muon for the matrices that it updates.
    single = trained.dense + (trained.ends + trained.experts if job.optimizer == "sgd" else 0.0)
    if job.optimizer in ("sgd", "muon"):
        optimizer -= 4.0 * single / np.where(zero >= 1, group, 1.0)
    return parameters, optimizer, gradients, growing


def stays_unbucketed(columns: Columns) -> NDArray[np.bool_]:
    """Return True for plans whose gradients stay in autograd's tensors, in their dtype, until the update."""
    alone = columns.dp_replicate * columns.dp_shard * columns.cp * columns.pp == 1
    return alone & (columns.num_micro == 1) & (columns.offload_optimizer == 0)


def awaits_pass(columns: Columns) -> NDArray[np.bool_]:
    """Return True for plans whose gradients stay in autograd's tensors until the microbatch ends.

    They are communicated afterwards, because a CUDA graph contains no collective.
    """
    ranks = columns.dp_replicate * columns.dp_shard * columns.cp
    return columns.graphs & (columns.num_micro == 1) & (ranks > 1) & (columns.pp == 1) & (columns.zero < 3)


def _gradient_share(columns: Columns, size: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the share of its gradients that a rank stores, and a mask of plans whose backward creates others.

    If gradients are communicated once per step, gradients of several microbatches are accumulated first. This holds for
    ZeRO 1 and 2 in Weft's runtime, and for ZeRO 3 that reshards after the step, as in a pipeline. Gradients of a single
    microbatch are communicated bucket by bucket.

    Under ZeRO 2, and in a pipeline without ZeRO 3, Weft's runtime accumulates gradients of several microbatches in
    autograd's tensors. If there are several data-parallel ranks, it has another buffer: for the rank's shard, or
    without ZeRO for all gradients.
    """
    zero, several = columns.zero, columns.num_micro > 1
    once = (zero < 3) | columns.reduces_once
    found = np.where((zero == 0) | (once & several), 1.0, 1 / size)
    piped = columns.pp > 1
    several = several & (zero < 3) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    own = np.where(zero == 0, np.where(piped, 1.0, 0.0), np.where(piped | (zero == 2), 1 / size, 0.0))
    followed = (piped & (zero < 3) & (columns.num_micro > 1)) | stays_unbucketed(columns)
    return np.where(followed, 0.0, found) + np.where(several, own, 0.0), followed | awaits_pass(columns)


def _buffers(job: Job, columns: Columns, shares: Shares, trained: Shares, layers: Array) -> tuple[Array, Array]:
    """Return the bytes of gathered parameters, and of gradients in communication during backward.

    ZeRO 3 gathers the current unit and the next one. If it reshards after backward or after the step, it gathers all
    parameters of the rank. `reshard_within` adds secondary shards. Below ZeRO 3, gradients are in communication during
    backward only if there is one microbatch per step and several data-parallel ranks.
    """
    stack, zero = job.stack, columns.zero
    shares = shares_in_format(job, columns, shares, layers, stack.gather_bytes)
    unit = (shares.dense + shares.experts) / np.maximum(1.0, layers)
    largest = np.maximum(unit, shares.ends)
    every = shares.dense + shares.experts + shares.ends
    moving = (trained.dense + trained.experts) / np.maximum(1.0, layers)
    held = np.where(columns.reshard == _AFTER_FORWARD, unit + largest, every)
    codes = np.where(columns.gather > 0, wire_columns.weight_bytes(columns, largest, 0.0), 0.0)  # one unit at a time
    held = held + np.where(columns.reshard_within > 0, every / np.maximum(1, columns.reshard_within), 0.0)
    gathered = np.where(zero == 3, stack.gather_bytes * held + codes, 0.0)
    travels = stack.reduce_bytes + wire_columns.copy_bytes(columns, stack.reduce_bytes)
    learnt = trained.dense + trained.experts + trained.ends
    leaving = np.minimum(BUCKETS_UNDER_WAY * stack.bucket_params + trained.ends, learnt) * travels
    single = (columns.num_micro == 1) & (columns.dp_replicate * columns.dp_shard * columns.cp > 1)
    flat = np.where(single, leaving, 0.0)
    reduced = np.where(zero == 3, (2 + travels) * moving, flat)
    return gathered, reduced


# Bytes of one rank by class, on the pipeline stage with the highest memory use.

CLASSES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "communicators", "context",
           "reserve")  # fmt: skip
#: Plans per chunk of computation, so that their values stay in the processor's cache.
_AT_ONCE = 1 << 14


class _Rows(NamedTuple):
    """Plans, and their distinct rows for activation bytes of a layer, model state bytes, and microbatches in flight."""

    columns: Columns
    layers: RowDeduplicator
    states: RowDeduplicator
    flights: RowDeduplicator


class _Rank(NamedTuple):
    """Bytes of the rank at one pipeline position, with one entry per distinct row of `_Rows`.

    Attributes:
        held: model state.
        logits: logits of a microbatch, and the tensors that the loss computes from them.
        ends: activations that a microbatch saves outside the layers.
        rank: position in the pipeline.
        groups: number of Weft's communicators over mesh axes, by distinct model state.
        lanes: number of communicators to other stages, by distinct microbatches in flight.
    """

    held: WeightBytes
    logits: Array
    ends: Array
    rank: Any
    groups: NDArray[np.int64]
    lanes: NDArray[np.int64]


def _rank_of(job: Job, rows: _Rows, place: Place, device_bytes: int) -> _Rank:
    layers, rank, embedding, head = place
    columns, states = rows.layers.rows, rows.states.rows
    layers = np.broadcast_to(layers, len(states))
    return _Rank(
        held=state_bytes(job, states, (layers, rank, embedding, head)),
        logits=logits_bytes(job, columns, device_bytes) if head else np.zeros(len(columns)),
        ends=end_bytes(job, columns, embedding, head),
        rank=rank,
        groups=axis_groups(job, states, embedding or head),
        lanes=lanes(rows.flights.rows, rank),
    )


def memory_bytes(job: Job, columns: Columns, tables: Tables, device_bytes: int) -> dict[str, Array]:
    """Return the bytes by class of the first, a middle or the last pipeline rank, whichever needs the most.

    "host" is the host memory of the first rank. A private step has the microbatches of its largest draw.
    """
    if job.private is not None:
        columns = in_largest_draw(job, columns)
        found = memory_bytes(replace(job, private=None), columns, tables, device_bytes)
        return {**found, "activations": found["activations"] + factor_bytes(job, columns)}
    piped = columns.pp > 1
    if piped.all() or not piped.any():
        return _of_kind(job, columns, tables, device_bytes)
    found = {name: np.empty(len(columns)) for name in (*CLASSES, "host")}
    for rows in (np.flatnonzero(piped), np.flatnonzero(~piped)):
        for name, values in _of_kind(job, columns[rows], tables, device_bytes).items():
            found[name][rows] = values
    return found


def _of_kind(job: Job, columns: Columns, tables: Tables, device_bytes: int) -> dict[str, Array]:
    """Compute `memory_bytes` for plans that either all have a pipeline or all lack one."""
    is_alone = len(columns) == 0 or columns.pp[0] == 1
    offloads = columns.offload_optimizer > 0 if is_alone else np.broadcast_to(np.False_, len(columns))
    several, chunks = np.minimum(2, columns.num_micro), chunks_per_rank(columns)
    states = RowDeduplicator.of(
        columns, OF_STATES, [chunks.astype(np.int64)], num_micro=several, offload_optimizer=offloads
    )
    rows = _Rows(columns, RowDeduplicator.of(columns, OF_LAYER), states, RowDeduplicator.of(columns, OF_FLIGHT))
    layers = even_layers(job.shape.layers, states.rows.pp, chunks[states.first])
    places: list[Place] = [(layers.middle, 0, True, True)]
    if not is_alone:
        last = rows.flights.rows.pp - 1
        places = [(layers.first, 0, True, False), (layers.middle, 1, False, False), (layers.last, last, False, True)]
    ranks = [_rank_of(job, rows, each, device_bytes) for each in places]
    layer = layer_bytes(job, rows.layers.rows)
    on_host = host_shares(job, states.rows, places[0][0]) if is_offloaded(columns) else None
    found: list[dict[str, Array]] = []
    for start in range(0, max(1, len(columns)), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        part = _Rows(rows.columns[some], rows.layers[some], rows.states[some], rows.flights[some])
        classes = [_at_stage(job, part, tables, layer, each) for each in ranks]
        kept: Any = 0.0
        if on_host is not None:
            flight = in_flight(part.flights.rows, 0)[part.flights.index]
            shares = taken(on_host, part.states.index)
            kept = host_bytes(job, part.columns, shares, layer.kept[part.layers.index], flight)
        found.append(_worst(part.columns, classes) | {"host": np.broadcast_to(kept, len(part.columns))})
    return found[0] if len(found) == 1 else {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def _worst(columns: Columns, ranks: list[dict[str, Array]]) -> dict[str, Array]:
    """Return the bytes of the rank with the highest total, or of the earliest such rank.

    Args:
        ranks: bytes of the first, a middle and the last pipeline rank, or of the only rank.
    """
    if len(ranks) == 1:
        return ranks[0]
    totals: list[Array] = [functools.reduce(np.add, each.values()) for each in ranks]
    totals[1] = np.where(columns.pp == 2, -1.0, totals[1])  # two stages have no middle rank
    second, third = totals[1] > totals[0], totals[2] > np.maximum(totals[0], totals[1])
    first, middle, last = ranks
    return {name: np.where(third, last[name], np.where(second, middle[name], first[name])) for name in first}


def rank_bytes(
    job: Job, columns: Columns, tables: Tables, layer: LayerBytes, place: Place, device_bytes: int
) -> dict[str, Array]:
    """Return the bytes by class of one rank, with one entry per plan, at its peak: in the loss, backward or update."""
    every = RowDeduplicator(columns, slice(None), slice(None))
    rows = _Rows(columns, every, every, every)
    return _at_stage(job, rows, tables, layer, _rank_of(job, rows, place, device_bytes))


def _at_stage(job: Job, rows: _Rows, tables: Tables, layer: LayerBytes, of: _Rank) -> dict[str, Array]:
    """Return the bytes by class of a rank. `layer` has one entry per distinct row of `rows.layers`."""
    columns, kinds, flights = rows.columns, rows.layers, rows.flights
    held, layer = of.held.rows(rows.states.index), taken(layer, kinds.index)
    one_pass = held.layers * layer.kept * (1 - columns.offload_activations)
    flight, begun = fullest_moment(flights.rows, of.rank, one_pass, held.learnt * job.stack.grad_bytes, flights.index)
    passing = _Pass(layer, of.logits[kinds.index], of.ends[kinds.index], flight, begun)
    count = of.groups[rows.states.index] + of.lanes[flights.index]
    return _classes(job, columns, tables, held, passing) | {
        "communicators": count.astype(np.float64) * (tables.communicator_gib * 2**30),
        "context": np.broadcast_to(np.float64(tables.context_gib * 2**30), len(columns)),
    }


class _Pass(NamedTuple):
    """Bytes of one microbatch: an average layer, the logits, and activations outside the layers (`ends`).

    Attributes:
        held: number of microbatches in flight.
        begun: share of the gradients that are computed at the peak.
    """

    layer: LayerBytes
    logits: Array
    ends: Array
    held: Array
    begun: Array


def _classes(job: Job, columns: Columns, tables: Tables, held: WeightBytes, passing: _Pass) -> dict[str, Array]:
    layer, logits, gathered = passing.layer, passing.logits, held.gathered
    times = held.layers * passing.held
    saved = times * layer.kept
    if np.isfinite(columns.activation_budget).any():
        share = np.minimum(columns.activation_budget, 1.0) * times * layer.whole
        saved = np.minimum(saved, np.where(columns.activation_budget < 1, share, columns.activation_budget))
    if columns.offload_activations.any():
        stays = 1 - columns.offload_activations
        saved = saved * stays + np.where(stays < 1, 2 * layer.kept, 0.0)
    saved = saved + passing.ends * passing.held
    recorded = columns.graphs.any()
    # With CUDA graphs, gradients are communicated from memory outside the graph's pool.
    leaving = np.where(columns.graphs, held.reduced, 0.0) if recorded else 0.0
    reduced = held.reduced - leaving + layer.beside
    # Two candidates for the peak: the loss with its logits, and backward of a layer with recomputed activations and
    # gradients in communication.
    kept, again, begun, loose = _while_backward(job, columns, held, passing, saved)
    again = kept + again
    late = again + reduced + loose > saved + logits
    activations, buffers = np.where(late, again, saved), gathered + np.where(late, reduced, 0.0) + leaving
    logits = np.where(late, 0.0, logits)
    if recorded:
        passes = passes_in_flight(columns)
        activations, logits = passes * activations, passes * logits
    made = begun * held.growing
    gradients = held.gradients + made
    gone = np.where(held.goes & ~late, np.where(held.loose, made, gradients), 0.0)
    if job.stack.step_bytes:  # third candidate: the update, with all gradients and no activations
        copies = held.optimizer * (job.stack.step_bytes / job.stack.main_bytes)
        buffers = np.maximum(buffers, gone + copies - activations - logits)
    return {
        "parameters": held.parameters * (1 - columns.offload_params) + held.second,
        "gradients": gradients - gone + held.carried,
        "optimizer": held.optimizer * (1 - columns.offload_optimizer),
        "activations": activations,
        "logits": logits,
        "buffers": buffers,
        "reserve": gone + (activations + logits + buffers) * (tables.reserve - 1),
    }


def _while_backward(
    job: Job, columns: Columns, held: WeightBytes, passing: _Pass, saved: Array
) -> tuple[Array, Array, Array, Any]:
    """Return the values at the peak of backward: saved bytes, bytes of the current layer, and computed gradients.

    Gradients are returned as a share of all, and in bytes. The bytes are 0 except for gradients in autograd's tensors,
    which do not exist during the loss.
    """
    layer, loose = passing.layer, held.loose
    if job.adapter is None and not loose.any():
        return saved, layer.whole, passing.begun, 0.0
    followed = layer.whole - layer.kept + layer.passing
    again = followed if job.adapter is not None else np.where(loose, followed, layer.whole)
    if not loose.any():
        return saved, again, passing.begun, 0.0
    each = unbucketed_width(job, columns)
    gradients = held.learnt * each
    left, share = fullest_of_backward(held.layers, saved, gradients, held.ends * each, tied=job.shape.tied)
    kept, share = np.where(loose, saved * left, saved), np.where(loose, share, passing.begun)
    return kept, again, share, np.where(loose, share * gradients, 0.0)
