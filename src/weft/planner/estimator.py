"""Step time and memory of many plans at once: one numpy array per term, one entry per plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import CLASSES, TERMS, LayerCosts, Parts, device_parts, layer_costs
from weft.planner.cost.machine import Fabric, Tables
from weft.planner.foresight import fits_chance, memory_spread, shipped
from weft.planner.measured import HostTables, host
from weft.planner.space import Columns, Job
from weft.spec import ClusterSpec

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimates:
    """What `estimate` says of each plan.

    terms: seconds of one optimizer step by name (TERMS); they sum to `step_s`. memory: bytes on the fullest rank by
    class (CLASSES); they sum to `total_bytes`. usable_bytes: what a run can use of the device's memory.
    host_bytes: of a rank in its host's memory, of which it may pin host_limit.
    tokens: of one step. memory_spread: scale of the errors of memory, as a logarithm.
    """

    terms: Mapping[str, Array]
    memory: Mapping[str, Array]
    usable_bytes: float
    tokens: float
    world_size: NDArray[np.int64]
    memory_spread: float
    host_bytes: Array
    host_limit: float

    @property
    def step_s(self) -> Array:
        """Seconds of one optimizer step."""
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def tokens_per_s(self) -> Array:
        """Tokens a second over all devices."""
        return self.tokens / self.step_s

    @property
    def allocated_bytes(self) -> Array:
        """Bytes in tensors at the fullest moment (torch.cuda.max_memory_allocated)."""
        outside = ("communicators", "context", "reserve")
        return np.sum([self.memory[name] for name in CLASSES if name not in outside], axis=0)

    @property
    def reserved_bytes(self) -> Array:
        """Bytes that the allocator holds (torch.cuda.max_memory_reserved)."""
        return self.allocated_bytes + self.memory["reserve"]

    @property
    def total_bytes(self) -> Array:
        """All bytes on the device: what the driver's tools show."""
        return np.sum(list(self.memory.values()), axis=0)

    @property
    def fits_probability(self) -> Array:
        """Chance that the plan runs without falling short of memory, 0 to 1."""
        room = np.log(self.usable_bytes / np.maximum(self.total_bytes, 1.0))
        return np.where(self.host_bytes > self.host_limit, 0.0, fits_chance(room, self.memory_spread))


def estimate(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Estimates:
    """Predict every row of `columns`. Rows that no rule allows get numbers too; prune them first.

    Args:
        job: model, sequence and batch.
        cluster: gives the size of a node; the rates are the tables'.
        columns: the plans.
        tables: constants of the device, or of a host that was measured.
    """
    if isinstance(tables, HostTables):
        return _estimates(job, cluster, columns, tables, [host.host_parts(job, columns, tables.laws)])
    return _estimates(job, cluster, columns, tables, list(device_parts(job, cluster, columns, tables)))


def estimate_memory(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Estimates:
    """Predict the memory of every row; without terms where that is less work.

    Args:
        job: model, sequence and batch.
        cluster: gives the size of a node.
        columns: the plans.
        tables: constants of the device, or of a host that was measured.
    """
    if isinstance(tables, HostTables) or job.stack.balanced_stages:
        return estimate(job, cluster, columns, tables)
    return _estimates(job, cluster, columns, tables, list(device_parts(job, cluster, columns, tables, timed=False)))


def estimate_seconds(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Array:
    """Predict the seconds of a step of every row; without memory where that is less work.

    Args:
        job: model, sequence and batch.
        cluster: gives the size of a node.
        columns: the plans.
        tables: constants of the device, or of a host that was measured.
    """
    if isinstance(tables, HostTables):
        return estimate(job, cluster, columns, tables).step_s
    factors = [tables.learned.get(name, 1.0) for name in TERMS]
    return np.concatenate(
        [
            np.sum([terms[name] * factor for name, factor in zip(TERMS, factors, strict=True)], axis=0)
            for terms, _ in device_parts(job, cluster, columns, tables, weighed=False)
        ]
    )


def costs_of_layer(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> LayerCosts:
    """Seconds of one layer and of the ends by part: what the terms of `estimate` are made of."""
    if isinstance(tables, HostTables):
        return host.host_layer_costs(job, columns, tables.laws)
    return layer_costs(
        job, columns, tables, Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription)
    )


def _estimates(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables, parts: Sequence[Parts]) -> Estimates:
    none = [np.zeros(len(columns))]
    on_host = isinstance(tables, HostTables)
    return Estimates(
        terms={
            name: np.concatenate([part[0][name] for part in parts if name in part[0]] or none)
            * tables.learned.get(name, 1.0)
            for name in TERMS
        },
        memory={name: np.concatenate([part[1][name] for part in parts]) for name in CLASSES},
        usable_bytes=tables.memory_bytes * tables.usable,
        tokens=float(job.tokens),
        world_size=columns.world_size,
        memory_spread=shipped().memory.spread if on_host else memory_spread(job, cluster),
        host_bytes=np.concatenate([part[1]["host"] for part in parts if "host" in part[1]] or none),
        host_limit=math.inf if on_host or not cluster.device.memory_bytes else cluster.device.pinnable_bytes,
    )
