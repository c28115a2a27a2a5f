"""Bytes of one rank by class, on the stage of a pipeline that needs most.

Hardly a figure reads all of a plan: what a layer saves, what weights take and how many passes are in flight are
computed once for each kind of rows, and only their sums for every row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.alike import Alike
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory.backward_memory import fullest_of_backward
from weft.planner.cost.memory.communicators import axis_groups, lanes
from weft.planner.cost.memory.host_memory import host_bytes, host_shares, is_offloaded
from weft.planner.cost.memory.layer_memory import OF_LAYER, LayerBytes, end_bytes, layer_bytes, logits_bytes
from weft.planner.cost.memory.recorded_memory import passes_held
from weft.planner.cost.memory.state_memory import OF_STATES, Place, WeightBytes, held_bytes, loose_width
from weft.planner.cost.pipeline import OF_FLIGHT, Stages, chunks_per_rank, even_layers, fullest_moment, in_flight
from weft.planner.space import Columns, Job

Array = NDArray[np.float64]

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


#: Rows that are worked on at a time: their figures stay in the processor's cache.
_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class _Rows:
    """Plans, and their kinds by what decides a layer's bytes, those of weights, and the passes in flight."""

    columns: Columns
    layers: Alike
    states: Alike
    flights: Alike

    @classmethod
    def of(cls, job: Job, columns: Columns, stages: Stages | None) -> tuple[_Rows, Stages]:
        """The plans, and the layers of their ranks by the kind of states."""
        is_alone = len(columns) > 0 and columns.pp[0] == 1
        offloads = columns.offload_optimizer > 0 if is_alone else np.broadcast_to(np.False_, len(columns))
        chunks = chunks_per_rank(columns)
        apart = [chunks] if stages is None else [stages.first, stages.middle, stages.last]
        layers = [each.astype(np.int64) for each in apart]
        several = np.minimum(2, columns.num_micro)
        states = Alike.of(columns, OF_STATES, layers, num_micro=several, offload_optimizer=offloads)
        rows = cls(columns, Alike.of(columns, OF_LAYER), states, Alike.of(columns, OF_FLIGHT))
        if stages is None:
            return rows, even_layers(job.shape.layers, states.rows.pp, chunks[states.first])
        return rows, stages.rows(states.first)

    def __getitem__(self, part: slice) -> _Rows:
        return _Rows(self.columns[part], self.layers[part], self.states[part], self.flights[part])


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is known of the rank at a place by the kinds of rows: bytes that it holds, of logits, of ends; its place.

    groups, lanes: communicators of Weft's own, by the kinds of states and of passes in flight.
    """

    held: WeightBytes
    logits: Array
    ends: Array
    rank: Any
    groups: NDArray[np.int64]
    lanes: NDArray[np.int64]

    @classmethod
    def of(cls, job: Job, rows: _Rows, place: Place, device_bytes: int) -> _Rank:
        layers, rank, embedding, head = place
        columns = rows.layers.rows
        layers = np.broadcast_to(layers, len(rows.states.rows))
        return cls(
            held=held_bytes(job, rows.states.rows, (layers, rank, embedding, head)),
            logits=logits_bytes(job, columns, device_bytes) if head else np.zeros(len(columns)),
            ends=end_bytes(job, columns, embedding, head),
            rank=rank,
            groups=axis_groups(job, rows.states.rows, embedding or head),
            lanes=lanes(rows.flights.rows, rank),
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """What passes through a rank: bytes of a mean layer and of the logits, passes in flight, share of gradients."""

    layer: LayerBytes
    logits: Array
    ends: Array
    held: Array
    begun: Array


def memory_bytes(
    job: Job, columns: Columns, tables: Tables, stages: Stages | None, device_bytes: int
) -> dict[str, Array]:
    """Return the bytes by class on the worst of the first, the second and the last rank of the pipeline.

    And as "host" what the first one keeps in its host's memory.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        tables: constants of the device.
        stages: layers of the ranks; None: they come out as even as can be.
        device_bytes: memory of a GPU, 0 of a CPU.
    """
    piped = columns.pp > 1
    found = {name: np.empty(len(columns)) for name in (*CLASSES, "host")}
    if piped.all() or not piped.any():
        _fill(found, slice(0, len(columns)), job, columns, tables, stages, device_bytes)
        return found
    for rows in (np.flatnonzero(piped), np.flatnonzero(~piped)):
        _fill(found, rows, job, columns[rows], tables, None if stages is None else stages.rows(rows), device_bytes)
    return found


def _fill(
    found: dict[str, Array], where: NDArray[np.intp] | slice, job: Job, columns: Columns, tables: Tables,
    stages: Stages | None, device_bytes: int,
) -> None:  # fmt: skip
    """Fill in the same, of rows that all have a pipeline or all have none. where: their places in `found`."""
    (rows, layers), p = _Rows.of(job, columns, stages), columns.pp
    places: list[Place] = [(layers.middle, 0, True, True)]
    if len(columns) and p[0] > 1:
        last = rows.flights.rows.pp - 1
        places = [(layers.first, 0, True, False), (layers.middle, 1, False, False), (layers.last, last, False, True)]
    ranks = [_Rank.of(job, rows, each, device_bytes) for each in places]
    layer = layer_bytes(job, rows.layers.rows)
    on_host = host_shares(job, rows.states.rows, places[0][0]) if is_offloaded(columns) else None
    for start in range(0, len(columns), _AT_ONCE):
        some = slice(start, min(start + _AT_ONCE, len(columns)))
        part = rows[some]
        bytes_of = _worst(part.columns, [_at_place(job, part, tables, layer, each) for each in ranks])
        kept: Any = 0.0
        if on_host is not None:
            flight = in_flight(part.flights.rows, 0)[part.flights.index]
            shares = on_host.rows(part.states.index)
            kept = host_bytes(job, part.columns, shares, layer.kept[part.layers.index], flight)
        there = some if isinstance(where, slice) else where[some]
        for name, values in (bytes_of | _lasting(job, tables, part) | {"host": kept}).items():
            found[name][there] = values


def _worst(columns: Columns, ranks: list[dict[str, Array]]) -> dict[str, Array]:
    """The bytes of the rank that needs most; of equal ones the first counts."""
    if len(ranks) == 1:
        return ranks[0]
    totals: list[Array] = [functools.reduce(np.add, each.values()) for each in ranks]
    totals[1] = np.where(columns.pp == 2, -1.0, totals[1])  # two stages have no middle
    second, third = totals[1] > totals[0], totals[2] > np.maximum(totals[0], totals[1])
    first, middle, last = ranks
    return {name: np.where(third, last[name], np.where(second, middle[name], first[name])) for name in first}


def rank_bytes(
    job: Job, columns: Columns, tables: Tables, layer: LayerBytes, place: Place, device_bytes: int
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
    every = Alike(columns, slice(None), slice(None))
    rows = _Rows(columns, every, every, every)
    return _at_place(job, rows, tables, layer, _Rank.of(job, rows, place, device_bytes)) | _lasting(job, tables, rows)


def _at_place(job: Job, rows: _Rows, tables: Tables, layer: LayerBytes, of: _Rank) -> dict[str, Array]:
    """The same, but for what is the same on every rank. layer: of each kind of layer."""
    columns, kinds = rows.columns, rows.layers
    held, layer = of.held.rows(rows.states.index), layer.rows(kinds.index)
    if job.stack.travel_once:
        one_pass = held.layers * layer.kept * (1 - columns.offload_activations)
        flights, made = rows.flights, held.learnt * job.stack.grad_bytes
        flight, begun = fullest_moment(flights.rows, of.rank, one_pass, made, flights.index)
    else:  # gradients have a place of their own from the start
        flight, begun = in_flight(rows.flights.rows, of.rank)[rows.flights.index], np.ones(())
    passing = _Pass(layer, of.logits[kinds.index], of.ends[kinds.index], flight, begun)
    found = _classes(job, columns, tables, held, passing)
    if job.stack.own_groups:
        count = of.groups[rows.states.index] + of.lanes[rows.flights.index]
        found["communicators"] = count.astype(np.float64) * (tables.communicator_gib * 2**30)
    return found


def _lasting(job: Job, tables: Tables, rows: _Rows) -> dict[str, Array]:
    """Bytes of the classes that are the same on every rank: of the device, and of groups where only axes have one."""
    context = np.broadcast_to(np.float64(tables.context_gib * 2**30), len(rows.columns))
    if job.stack.own_groups:
        return {"context": context}
    columns = rows.states.rows
    groups = 1 + (columns.tp > 1) + (columns.pp > 1) + (columns.cp > 1) + (columns.ep > 1)
    groups = groups + (columns.dp_shard > 1) + (columns.dp_replicate > 1)
    communicators = np.where(columns.world_size > 1, groups, 0) * tables.communicator_gib * 2**30
    return {"communicators": communicators[rows.states.index], "context": context}


def _classes(job: Job, columns: Columns, tables: Tables, held: WeightBytes, passing: _Pass) -> dict[str, Array]:
    """Bytes of the classes that change during a step, at the fuller moment."""
    layer, logits, gathered = passing.layer, passing.logits, held.gathered
    saved = _saved_bytes(columns, held, passing)
    recorded = columns.graphs.any()
    # Of a graph, gradients travel beside the memory that it keeps.
    leaving = np.where(columns.graphs, held.reduced, 0.0) if recorded else 0.0
    reduced = held.reduced - leaving + layer.beside
    # Two moments: the loss, with its logits; then backward of a layer, with what recompute makes again and gradients
    # on their way.
    kept, again, begun, loose = _while_backward(job, columns, held, passing, saved)
    again = kept + again
    late = again + reduced + loose > saved + logits
    activations, buffers = np.where(late, again, saved), gathered + np.where(late, reduced, 0.0) + leaving
    logits = np.where(late, 0.0, logits)
    if recorded:
        times = passes_held(columns)
        activations, logits = times * activations, times * logits
    made = begun * held.growing
    gradients = held.gradients + made
    gone = np.where(held.goes & ~late, np.where(held.loose, made, gradients), 0.0)
    return {
        "parameters": held.parameters * (1 - columns.offload_params) + held.second,
        "gradients": gradients - gone + held.carried,
        "optimizer": held.optimizer * (1 - columns.offload_optimizer),
        "activations": activations,
        "logits": logits,
        "buffers": buffers,
        "reserve": gone + (activations + logits + buffers) * (tables.reserve - 1),
    }


def _saved_bytes(columns: Columns, held: WeightBytes, passing: _Pass) -> Array:
    """Bytes of the activations that are saved on the device for all passes in flight."""
    layer, times = passing.layer, held.layers * passing.held
    saved = times * layer.kept
    if np.isfinite(columns.activation_budget).any():
        share = np.minimum(columns.activation_budget, 1.0) * times * layer.whole
        saved = np.minimum(saved, np.where(columns.activation_budget < 1, share, columns.activation_budget))
    if columns.offload_activations.any():
        offloaded = 1 - columns.offload_activations
        saved = saved * offloaded + np.where(offloaded < 1, 2 * layer.kept, 0.0)
    return saved + passing.ends * passing.held


def _while_backward(
    job: Job, columns: Columns, held: WeightBytes, passing: _Pass, saved: Array
) -> tuple[Array, Array, Array, Any]:
    """Bytes of saved activations and of a layer at work at the fullest moment of backward, and gradients by then.

    Those are told by their share and, where they stay loose, by their bytes, which are not there at the loss.
    """
    layer, loose = passing.layer, held.loose
    if job.adapter is None and not loose.any():
        return saved, layer.whole, passing.begun, 0.0
    followed = layer.whole - layer.kept + layer.passing
    again = followed if job.adapter is not None else np.where(loose, followed, layer.whole)
    if not loose.any():
        return saved, again, passing.begun, 0.0
    each = loose_width(job, columns)
    gradients = held.learnt * each
    left, share = fullest_of_backward(held.layers, saved, gradients, held.ends * each, tied=job.shape.tied)
    kept, share = np.where(loose, saved * left, saved), np.where(loose, share, passing.begun)
    return kept, again, share, np.where(loose, share * gradients, 0.0)
