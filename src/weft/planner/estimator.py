"""Step time and memory of many plans: one numpy array per term, with one entry per plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import ClusterSpec
from weft.planner.cost.layer import LayerCosts, layer_costs
from weft.planner.cost.machine import Fabric, Tables
from weft.planner.cost.memory import CLASSES, memory_bytes
from weft.planner.cost.step import step_terms
from weft.planner.space.columns import Columns, Job
from weft.planner.uncertainty import fits_chance, memory_error_scale, shipped

Array = NDArray[np.float64]
#: With fewer rows, one numpy call adds all arrays.
_FEW = 1024


@dataclass(frozen=True, slots=True)
class Estimates:
    """Result of `estimate`: time and memory of each plan.

    Attributes:
        terms: time (s) of one optimizer step by name (TERMS); they sum to `step_s`. {} from `estimate_memory`.
        memory: bytes by class (CLASSES) on the rank with the highest memory use; they sum to `total_bytes`.
        usable_bytes: device memory that a run can use.
        tokens: tokens of one step.
        memory_spread: scale of the logarithmic error of the memory estimate.
        host_bytes: host memory (bytes) of a rank.
        host_limit: host memory (bytes) that a rank may pin; inf on a CPU or if the device's memory is unknown.
    """

    terms: Mapping[str, Array]
    memory: Mapping[str, Array]
    usable_bytes: float
    tokens: float
    memory_spread: float
    host_bytes: Array
    host_limit: float

    @property
    def step_s(self) -> Array:
        """Time (s) of one optimizer step."""
        return _added(self.terms.values())

    @property
    def tokens_per_s(self) -> Array:
        """Tokens per second over all devices."""
        return self.tokens / self.step_s

    @property
    def allocated_bytes(self) -> Array:
        """Peak bytes in tensors (torch's max_memory_allocated)."""
        outside = ("communicators", "context", "reserve")
        return _added(self.memory[name] for name in CLASSES if name not in outside)

    @property
    def reserved_bytes(self) -> Array:
        """Peak bytes of the allocator (torch's max_memory_reserved)."""
        return self.allocated_bytes + self.memory["reserve"]

    @property
    def total_bytes(self) -> Array:
        """All bytes on the device, as nvidia-smi reports them."""
        return _added(self.memory.values())

    @property
    def fits_probability(self) -> Array:
        """Probability, 0 to 1, that the plan does not run out of memory; 0 if `host_bytes` exceeds `host_limit`."""
        return self.chance(self.total_bytes)

    def chance(self, total: Array) -> Array:
        """Return `fits_probability` for a `total_bytes` that is already computed."""
        room = np.log(self.usable_bytes / np.maximum(total, 1.0))
        return np.where(self.host_bytes > self.host_limit, 0.0, fits_chance(room, self.memory_spread))


def _added(parts: Iterable[Array]) -> Array:
    """Return the sum of arrays. Long arrays are added one by one, since stacking them would take longer."""
    first, *others = parts
    if len(first) < _FEW:
        return np.sum([first, *others], axis=0)
    found = first.astype(np.float64)
    for each in others:
        found += each
    return found


def estimate(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Estimates:
    """Predict time and memory of every plan in `columns`. Invalid plans get numbers too; prune them before the call."""
    return replace(estimate_memory(job, cluster, columns, tables), terms=_terms(job, cluster, columns, tables))


def estimate_memory(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Estimates:
    """Predict the memory of every plan, without time terms."""
    device, on_host = cluster.device, cluster.device.is_cpu
    memory = memory_bytes(job, columns, tables, 0 if on_host else device.memory_bytes)
    return Estimates(
        terms={},
        memory={name: memory[name] for name in CLASSES},
        usable_bytes=tables.memory_bytes * tables.usable,
        tokens=float(job.tokens),
        memory_spread=shipped().memory.spread if on_host else memory_error_scale(job, cluster),
        host_bytes=memory["host"],
        host_limit=math.inf if on_host or not device.memory_bytes else device.pinnable_bytes,
    )


def estimate_seconds(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> Array:
    """Predict the step time (s) of every plan, without memory."""
    return _added(_terms(job, cluster, columns, tables).values())


def _terms(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> dict[str, Array]:
    terms = step_terms(job, cluster, columns.with_average_microbatch(job), tables)
    terms |= {name: terms[name] * factor for name, factor in tables.learned.items() if name in terms}
    return terms if tables.slowdown == 1.0 else {name: each * tables.slowdown for name, each in terms.items()}


def costs_of_layer(job: Job, cluster: ClusterSpec, columns: Columns, tables: Tables) -> LayerCosts:
    """Return the time (s) of one layer, embedding and head by part. `estimate` computes its terms from them."""
    return layer_costs(
        job,
        columns.with_average_microbatch(job),
        tables,
        Fabric.of(tables, cluster.devices_per_node, cluster.rack_nodes, cluster.oversubscription),
    )
