"""Time (s) of offloading (transfers and the optimizer step on the host) and of data-parallel communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import RESHARDS
from weft.planner.cost.machine import Fabric, Tables
from weft.planner.cost.shares import Shares, zero_groups
from weft.planner.space import columns as wire_columns
from weft.planner.space.columns import PRECISIONS, Columns, Job

Array = NDArray[np.float64]

#: Bytes per parameter that an Adam step on the host moves (g, p, m and v read; p, m and v written).
_HOST_STEP_BYTES = 28.0


@dataclass(frozen=True, slots=True)
class Window:
    """Compute time (s) of one microbatch on a rank, forward and backward, and the rank's number of layers."""

    forward: Array
    backward: Array
    layers: Array


def offload_s(
    job: Job, columns: Columns, tables: Tables, window: Window, states: tuple[Array, Array], kept: Array,
    devices_per_node: int,
) -> Array:  # fmt: skip
    """Return the time (s) that offloading adds to a step: exposed transfers, and the optimizer step on the host.

    Transfers overlap with compute (Ren et al. 2021, arXiv 2101.06840). Activations move to the host during forward and
    back during backward. A layer waits for the part of a transfer that takes longer than its compute. The other part
    slows its compute down. The devices of a node and the optimizer step on the host share the host's memory bandwidth.

    Args:
        states: number of parameters that the rank's optimizer updates, and of all parameters of the rank, as values of
            the format in which they are gathered.
        kept: activation bytes of one microbatch in an average layer.
    """
    shares = (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    if not any(share.any() for share in shares):
        return np.zeros(len(columns))
    optimizer, params, activations = shares
    own, every = states
    rate, passes, layers = tables.host_rate, columns.num_micro.astype(np.float64), window.layers
    forward, backward = (each / np.maximum(1.0, layers) for each in (window.forward, window.backward))
    step = np.maximum(optimizer, params) * own * (_HOST_STEP_BYTES * devices_per_node / tables.host_step_rate)
    out = optimizer * own * job.stack.grad_bytes / rate
    back = optimizer * own * job.stack.weight_bytes / rate
    sums = np.where(columns.reduces_once, 1.0, passes)
    gathers = np.where(columns.reshard == RESHARDS.index("after_forward"), 2 * passes, sums)
    moved = params * (gathers * every * job.stack.gather_bytes + sums * own * job.stack.grad_bytes) / rate
    late = np.maximum(0.0, out + moved - passes * layers * (forward + backward) * (2 / 3))
    each = activations * kept / min(rate, tables.host_step_rate / devices_per_node)
    hidden = np.minimum(each, forward) + np.minimum(each, backward)
    return step + back + late + passes * layers * (2 * each - hidden + (tables.overlap_compute - 1) * hidden)


# Exposed time (s) of data-parallel communication: the part that does not overlap with forward and backward.


#: The columns that a rank's communication of gradients and parameters depends on, in addition to its layers.
OF_TRAFFIC = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "order", "zero", "reshard_within", "gather", "reduce",
    "compress", "sync", "sync_every", "sync_fragments", "shard_shares",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Time (s) of a rank's data-parallel communication, before overlap, and its number of units.

    Attributes:
        gathers: gather of all parameters.
        again: second gather, in backward.
        reduces: reduction of all gradients.
        short: reduction of all gradients in a half-precision format.
        meetings: one outer step of replicas under local SGD.
        units: layers of the rank, which are communicated one after the other.
    """

    gathers: Array
    again: Array
    reduces: Array
    short: Array
    meetings: Array
    units: Array


def traffic_of(job: Job, columns: Columns, fabric: Fabric, shares: tuple[Shares, Shares], layers: Array) -> RankTraffic:
    """Return a rank's communication, with one entry per plan. Only the columns of OF_TRAFFIC are read.

    Args:
        shares: all parameters as communicated (`shares_in_format`), and trained parameters.
        layers: layers that are communicated one after the other.
    """
    units = np.maximum(1.0, layers)
    gathers, reduces, short = (each * columns.largest_shard for each in _traffic(job, columns, fabric, shares, units))
    again = gathers
    if columns.reshard_within.any():
        # Gathers from secondary shards, over neighboring ranks, in the compute format.
        has = columns.reshard_within > 0
        near = columns.with_arrays(
            dp_shard=np.where(has, columns.reshard_within, columns.dp_shard), gather=np.zeros_like(columns.gather)
        )
        again = np.where(has, _traffic(job, near, fabric, shares, units)[0], gathers)
    return RankTraffic(gathers, again, reduces, short, _sync_s(job, columns, fabric, shares[1]), units)


def exposed_s(job: Job, columns: Columns, tables: Tables, traffic: RankTraffic, window: Window) -> tuple[Array, Array]:
    """Return the exposed time (s) of a step's data-parallel communication, and the time that it adds to compute."""
    stack, units = job.stack, traffic.units
    sharded, once = columns.zero == 3, columns.reduces_once
    passes = np.where(sharded & ~once, columns.num_micro, 1).astype(np.float64)
    gathers_b = np.where(sharded & (columns.reshard == 0), traffic.again, 0.0)
    # A CUDA graph contains no collective: weights are gathered before it begins, and gradients are reduced after it
    # ends.
    beside = ~columns.graphs
    open_f, busy_f = _hide(traffic.gathers, window.forward, units, tables, stack.overlap_data & beside)
    # In a pipeline, ZeRO 3 reduces gradients at the end of the schedule, when there is no compute to overlap with.
    hides_b = stack.overlap_data & ~(sharded & once & (columns.pp > 1)) & beside
    # Gradients are communicated in half precision, but accumulated ones never.
    halves = np.isin(columns.precision, [PRECISIONS.index(name) for name in ("bf16", "fp16", "fp8")])
    is_short = halves & ((columns.num_micro == 1) | ((columns.zero == 3) & ~columns.reduces_once))
    reduces = np.where(is_short, traffic.short, traffic.reduces)
    open_b, busy_b = _hide(gathers_b + reduces, window.backward, units, tables, hides_b)
    lost = (tables.overlap_compute - 1) * (busy_f + busy_b)
    exposed = passes * (open_f + open_b)
    if columns.sync.any():
        # An outer step of all parameters together is fully exposed. A fragment is communicated while a step computes.
        computes = columns.num_micro * (window.forward + window.backward)
        fragments = np.maximum(1, columns.sync_fragments)
        hidden = np.where(columns.sync_fragments > 0, np.minimum(traffic.meetings / fragments, computes), 0.0)
        sync = (traffic.meetings - fragments * hidden) / columns.sync_every
        exposed = exposed + np.where(columns.sync > 0, sync, 0.0)
    return exposed, passes * lost


def gathered_s(
    job: Job, columns: Columns, tables: Tables, fabric: Fabric, held: Shares, window: Window
) -> Array:  # fmt: skip
    """Return the exposed time (s) of gathering parameters under ZeRO 3 for a forward without backward."""
    if not (columns.zero == 3).any():
        return np.zeros(len(columns))
    units = np.maximum(1.0, window.layers)
    none = Shares(dense=0 * held.dense, experts=0 * held.experts, ends=0 * held.ends)
    gathers, *_ = _traffic(job, columns, fabric, (held, none), units)
    exposed, busy = _hide(gathers, window.forward, units, tables, job.stack.overlap_data)
    return np.where(columns.zero == 3, exposed + (tables.overlap_compute - 1) * busy, 0.0)


def _sync_s(job: Job, columns: Columns, fabric: Fabric, trained: Shares) -> Array:
    total = np.zeros(len(columns))
    if not columns.sync.any():
        return total
    parts = zip((trained.dense + trained.ends, trained.experts), zero_groups(columns, 1), strict=True)
    replicas, apart = columns.dp_replicate.astype(np.float64), columns.stride("dp_replicate")
    for learnt, size in list(parts)[: 2 if job.shape.moe_layers else 1]:
        held = learnt / size
        travelling = wire_columns.replica_bytes(columns, held, job.stack.reduce_bytes)
        total += np.where(learnt > 0, fabric.ring_s("all_reduce", travelling, replicas, apart), 0.0)
    return total


def _hide(
    travel: Array, compute: Array, units: Array, tables: Tables, hides: bool | NDArray[np.bool_]
) -> tuple[Array, Array]:
    """Return exposed and hidden time (s) if the communication of each unit overlaps with the next unit's compute.

    Args:
        travel: time (s) of the communication of all units.
        hides: False if nothing overlaps.
    """
    slow = travel * tables.overlap_comm
    first = travel / units
    beside = np.minimum((slow - first).clip(0), compute)
    exposed = np.where(hides, np.maximum(first, slow - beside), travel)
    exposed = np.where(travel > 0, exposed, 0.0)
    return exposed, np.where(hides, beside, 0.0)


def _traffic(
    job: Job, columns: Columns, fabric: Fabric, shares: tuple[Shares, Shares], units: Array
) -> tuple[Array, Array, Array]:
    """Return the time (s) to gather parameters once, and to reduce gradients once, without and with half precision.

    Gradients are reduced in half precision only within a node.
    """
    held, trained = shares
    stack = job.stack
    t, c, e = (getattr(columns, name).astype(np.float64) for name in ("tp", "cp", "ep"))
    replicas, shard = columns.dp_replicate.astype(np.float64), columns.dp_shard.astype(np.float64)
    parts = (
        (held.dense, trained.dense, shard * c, _stride(columns, fabric), units, True),
        (held.ends, trained.ends, shard * c, _stride(columns, fabric), np.ones_like(t), False),
        (held.experts, trained.experts, np.maximum(1.0, shard * c * t / e), e, units, False),
    )
    gathers, reduces, shorter = np.zeros(len(columns)), np.zeros(len(columns)), np.zeros(len(columns))
    apart = columns.stride("dp_replicate")
    gather_bytes = np.where(columns.zero == 3, stack.gather_bytes, stack.weight_bytes)
    for params, learnt, group, stride, most, in_layers in parts[: 3 if job.shape.moe_layers else 2]:
        # Under ZeRO 3 there is one collective per layer. Otherwise there is one per bucket if they overlap with
        # compute, or a single one.
        bucket = np.maximum(stack.bucket_params, stack.bucket_params_per_rank * group)
        buckets = np.ceil(params / bucket) if stack.overlap_data else np.ones_like(t)
        pieces = np.where(columns.zero == 3, most, np.maximum(1.0, buckets))

        def sent(own_bytes: float, numel: Array = learnt / pieces) -> Array:
            return wire_columns.wire_bytes(columns, numel, own_bytes)

        ring = np.where(columns.zero == 0, 2.0, 1.0)
        reduced = pieces * fabric.ring_s("reduce_scatter", sent(stack.reduce_bytes), group, stride) * ring
        part = learnt / pieces / np.where(columns.zero == 0, 1.0, group)
        beside = wire_columns.wire_bytes(columns, part, stack.reduce_bytes, "replicas")
        across = np.where(columns.sync > 0, 0.0, fabric.ring_s("all_reduce", beside, replicas, apart))
        reduces += np.where(learnt > 0, reduced + pieces * across, 0.0)
        # Within a node, gradients are reduced in their own format. Under ZeRO 1 and 2 the head's gradients (in `ends`)
        # are fp32.
        near = (columns.zero > 0) & (group <= np.minimum(_NODE_RANKS, fabric.inside(group, stride)))
        halved = pieces * fabric.ring_s("reduce_scatter", sent(_HALF_BYTES), group, stride)
        less = np.where(near & ((params is not held.ends) | (columns.zero == 3)), halved - reduced, 0.0)
        shorter += np.where(learnt > 0, less, 0.0)
        # Under ZeRO 1 and 2 updated parameters are gathered, under ZeRO 3 all parameters.
        brought = np.where(columns.zero == 3, params, learnt)
        weights = wire_columns.weight_bytes(columns, brought / pieces, gather_bytes, in_layers=in_layers)
        gathered = pieces * fabric.ring_s("all_gather", weights, group, stride)
        gathers += np.where((brought > 0) & (columns.zero > 0), gathered, 0.0)
    return gathers, reduces, reduces + shorter


#: Maximum number of ranks in a node that reduce gradients in half-precision formats, and bytes of a value in these.
_NODE_RANKS, _HALF_BYTES = 16, 2.0


def _stride(columns: Columns, fabric: Fabric) -> Array:
    """Return the distance in ranks between neighbors of a group over dp_shard and cp.

    If a plan does not have the default axis order, return the stride of a regular group with as many members per
    scale-up domain.
    """
    usual = columns.stride("cp").astype(np.float64)
    if not columns.order.any():
        return usual
    inside = fabric.inside(columns.dp_shard, columns.stride("dp_shard")) * fabric.inside(
        columns.cp, columns.stride("cp")
    )
    return np.where(columns.order > 0, np.maximum(1.0, fabric.domain / inside), usual)
