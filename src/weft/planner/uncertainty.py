"""Uncertainty of estimates: properties that errors depend on, error bands, and probabilities of fitting into memory."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import ClusterSpec
from weft.planner.cost.machine import generation
from weft.planner.space.columns import Job
from weft.planner.space.shape import TracedShape

#: Generations with dozens of published runs.
WELL_KNOWN = frozenset({"ampere", "hopper"})
#: Tokens per sequence above which few runs were published.
_LONG = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContext:
    """Properties of a run on which the error of its estimate depends.

    Attributes:
        generation: device generation, such as "hopper"; "" for a generation without published runs.
        experts: True if the model has experts.
        narrow: True for fp8 or fp4 matmuls.
        nodes: nodes of the run.
        decoder: True if the model reads tokens and predicts the next, as in all published runs.
        adapter: True if an adapter is trained instead of the weights.
        graphs: True if steps are launched as CUDA graphs.
    """

    generation: str
    experts: bool
    narrow: bool
    seq_len: int
    nodes: int
    decoder: bool = True
    adapter: bool = False
    graphs: bool = False

    @property
    def uncertainty_terms(self) -> dict[str, float]:
        """Measures of the properties that increase the error, by name. 0 means: as in most published runs."""
        return {
            "experts": float(self.experts),
            "narrow": float(self.narrow),
            "newer": float(self.generation not in WELL_KNOWN),
            "long": max(0.0, math.log2(self.seq_len / _LONG) + 1) if self.seq_len >= _LONG else 0.0,
        }


def error_context(job: Job, cluster: ClusterSpec, precision: str, num_devices: int) -> ErrorContext:
    """Return the properties of one plan that the error of its estimate depends on, without `graphs`."""
    return ErrorContext(
        generation=generation(cluster.device.name),
        experts=job.shape.moe_layers > 0,
        narrow=precision in ("fp8", "fp4"),
        seq_len=job.seq_len,
        nodes=-(-num_devices // cluster.devices_per_node),
        decoder=not isinstance(job.shape, TracedShape) or job.shape.is_causal_decoder,
        adapter=job.adapter is not None,
    )


def unmeasured(one: ErrorContext, device: str) -> tuple[str, ...]:
    """Return descriptions of properties that no published run had; empty if there were similar runs."""
    found: list[str] = []
    if not one.generation:
        found.append(f"no run on {device.rstrip('*')} or its kind")
    if not one.decoder:
        found.append("no model but decoders of text")
    if one.adapter:
        found.append("no run with an adapter")
    if one.graphs:
        found.append("no run with CUDA graphs")
    if one.narrow and one.generation not in ("hopper", "blackwell", "cdna"):
        found.append("no run in fp8 or fp4 on this device")
    if one.experts and one.generation in ("volta", "ampere"):
        found.append("no run with experts on this device")
    if one.seq_len > 2**18:
        found.append("no sequence beyond 262,144 tokens")
    if one.nodes > 2048:
        found.append("no run on more than 2,048 nodes")
    return tuple(found)


# Error bands and probabilities from prediction errors: their width by context, and quantiles.

Array = NDArray[np.float64]

#: Shares of cases that error bands should contain.
LEVELS = (0.5, 0.8, 0.95)
TIME_DOUBTS = ("experts", "narrow", "newer", "long")
MEMORY_DOUBTS = ("experts", "newer")


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """Scale of errors by context: `spread`, times exp(weight * term) for each of the context's uncertainty terms."""

    spread: float
    weights: Mapping[str, float]

    def scale(self, one: ErrorContext) -> float:
        """Return the scale of the prediction error."""
        doubts = one.uncertainty_terms
        return self.spread * math.exp(sum(weight * doubts[name] for name, weight in self.weights.items()))


@dataclass(frozen=True, slots=True)
class Band:
    """Error band: in a share `level` of cases, the measured value is between `low` and `high` times the estimate."""

    level: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Error statistics from published runs.

    Attributes:
        time, memory: scales of the errors of step times and of memory.
        quantiles: lower and upper quantile of the logarithmic error of step times by level, in units of the scale.
        gross: share of memory estimates with gross errors.
        gross_spread: scale of gross errors.
        runs, sources: numbers of runs and sources behind the time model.
    """

    time: ErrorModel
    quantiles: Mapping[float, tuple[float, float]]
    memory: ErrorModel
    gross: float
    gross_spread: float
    runs: int
    sources: int


@functools.cache
def shipped() -> Experience:
    """Return the error statistics that are part of the package."""
    text = Path(__file__).with_name("experience.toml").read_text(encoding="utf-8")
    return experience_of(tomllib.loads(text))


def experience_of(table: Mapping[str, Any]) -> Experience:
    """Return the error statistics from a table in the format of experience.toml."""
    time, memory = table["time"], table["memory"]
    return Experience(
        time=ErrorModel(time["spread"], time["doubts"]),
        quantiles={float(level): (low, high) for level, (low, high) in time["quantiles"].items()},
        memory=ErrorModel(memory["spread"], memory["doubts"]),
        gross=memory["gross"],
        gross_spread=memory["gross_spread"],
        runs=time["runs"],
        sources=time["sources"],
    )


def time_bands(one: ErrorContext, known: Experience | None = None) -> dict[float, Band]:
    """Return the error bands of a step time by level, as factors on the estimate."""
    known = shipped() if known is None else known
    scale = known.time.scale(one)
    return {
        level: Band(level, math.exp(low * scale), math.exp(high * scale))
        for level, (low, high) in known.quantiles.items()
    }


def memory_error_scale(job: Job, cluster: ClusterSpec) -> float:
    """Return the scale of the logarithmic error of memory estimates for a job on a cluster."""
    return shipped().memory.scale(error_context(job, cluster, "bf16", cluster.num_devices))


def fits_chance(room: Array, spread: float, known: Experience | None = None) -> Array:
    """Return the probability that each plan does not run out of memory.

    Most estimates have small errors, but some have large ones: a fragmented allocator, or another loss than assumed.

    Args:
        room: log(usable / needed) of each plan.
        spread: scale of memory errors, from `Experience.memory` for the context.
    """
    known = shipped() if known is None else known
    near, far = _logistic(room / spread), _logistic(room / known.gross_spread)
    return (1 - known.gross) * near + known.gross * far


def _logistic(deviations: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-1.702 * np.clip(deviations, -40, 40)))  # approximates the normal distribution
