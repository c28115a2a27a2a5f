"""Who works at the same time on a host: layers of the busiest rank, and ranks beside it, as Weft divides a model."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost.pipeline_cost import bubble_s, sends
from weft.planner.space.columns import Columns, Job
from weft.spec import divide_layers
from weft.spec.plan import SCHEDULES
from weft.spec.schedule import stage_owner

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Crowd:
    """By row. layers: of the busiest rank of the pipeline; has_embedding, has_head: 1 where it holds them.

    steady: ranks at work in the middle of a step, in whole ranks of work: a stage with half of the busiest one's work
    counts half. bubble_share: of a whole bubble that the schedule leaves. sends: messages that are waited for.
    """

    layers: Array
    has_embedding: Array
    has_head: Array
    steady: Array
    bubble_share: Array
    sends: Array

    def rows(self, chosen: NDArray[np.bool_]) -> Crowd:
        """The chosen rows."""
        return Crowd(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


def crowd_of(job: Job, columns: Columns) -> Crowd:
    """The crowd of every row; rows whose pipelines are alike are looked at once."""
    key = np.stack([columns.pp, columns.virtual_stages, columns.schedule.astype(np.int64)])
    kinds, index = np.unique(key, axis=1, return_inverse=True)
    found = np.array([_kind(job, *map(int, kind)) for kind in kinds.T])[index.reshape(-1)]
    count = len(columns)
    one, third = np.ones(count), np.full(count, 1 / 3)
    # Of a bubble of one pass; forward, gradients of inputs and of weights take a third each.
    share = bubble_s(columns, third, 2 * third, third, one)
    return Crowd(
        layers=found[:, 0],
        has_embedding=found[:, 1],
        has_head=found[:, 2],
        steady=columns.world_size * found[:, 3],
        bubble_share=np.where(columns.pp > 1, share, 0.0),
        sends=sends(columns),
    )


def ranks_of(job: Job, columns: Columns) -> list[tuple[NDArray[np.bool_], Array, Array, Array]]:
    """For every rank of the longest pipeline: which rows have it, its layers, and 1 where it has embedding and head."""
    longest = int(columns.pp.max()) if len(columns) else 0
    key = np.stack([columns.pp, columns.virtual_stages, columns.schedule.astype(np.int64)])
    kinds, index = np.unique(key, axis=1, return_inverse=True)
    table = np.zeros((longest, 3, kinds.shape[1]))
    for place, kind in enumerate(kinds.T):
        layers, first, last = _divided(job, *map(int, kind))
        table[: len(layers), 0, place] = layers
        table[first, 1, place] = table[last, 2, place] = 1.0
    index = index.reshape(-1)
    return [(columns.pp > rank, *(table[rank, part, index] for part in range(3))) for rank in range(longest)]


def _divided(job: Job, pp: int, virtual_stages: int, schedule: int) -> tuple[list[int], int, int]:
    """Layers of each rank of a pipeline, and the ranks that hold embedding and head."""
    shape = job.shape
    num_stages = pp * virtual_stages if pp > 1 else 1
    if shape.layers < num_stages:  # no rule allows it: numbers are needed, and nobody reads them
        return [shape.layers] * pp, 0, pp - 1
    layer, head = float(shape.dense_layer_params or shape.moe_shared_params), float(shape.vocab * shape.hidden)
    counts = divide_layers([layer] * shape.layers, num_stages, after=head)
    owners = [stage_owner(SCHEDULES[schedule], pp, stage) for stage in range(num_stages)]
    layers = [sum(n for n, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(pp)]
    return layers, owners[0], owners[-1]


def _kind(job: Job, pp: int, virtual_stages: int, schedule: int) -> tuple[float, float, float, float]:
    """Layers of the busiest rank, whether it has the embedding and the head, and the ranks' mean work over its own."""
    layers, first, last = _divided(job, pp, virtual_stages, schedule)
    layer = float(job.shape.dense_layer_params or job.shape.moe_shared_params)
    head = float(job.shape.vocab * job.shape.hidden)
    work = [count * layer + head * (rank == last) for rank, count in enumerate(layers)]
    busiest = max(range(pp), key=work.__getitem__)
    return float(layers[busiest]), float(first == busiest), float(last == busiest), sum(work) / pp / work[busiest]
