"""What an estimate is of, as far as its errors depend on it: kind of model, device, format, scale, length."""

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
from weft.planner.space.columns import Job
from weft.planner.space.shape import Shape, TracedShape

#: Makes of devices by what their names begin with; the first that fits.
_GENERATIONS = (
    ("volta", ("v100",)),
    ("ampere", ("a100", "a800")),
    ("hopper", ("h100", "h200", "h800", "h20", "gh200")),
    ("blackwell", ("b200", "b300", "gb200", "gb300")),
    ("cdna", ("mi300x", "mi325x", "mi350x", "mi355x")),
    ("tpu", ("tpu-v5p", "tpu-v6e")),
)
#: Those for which dozens of runs were published.
WELL_KNOWN = frozenset({"ampere", "hopper"})
#: Tokens of a sequence, and nodes, from which on few runs were published.
_LONG, _MANY = 16_384, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContext:
    """experts: whether it has any. narrow: fp8 or fp4 products. nodes: of the run. stages: of its pipeline.

    decoder: whether the model reads tokens and says the next, as those of all published runs do. adapter: whether one
    is trained in place of the weights. graphs: whether steps are launched as CUDA graphs.
    """

    generation: str
    experts: bool
    narrow: bool
    seq_len: int
    nodes: int
    stages: int
    decoder: bool = True
    adapter: bool = False
    graphs: bool = False

    @property
    def uncertainty_terms(self) -> dict[str, float]:
        """What makes an error larger, each from 0 (as in most published runs) upwards, by name."""
        return {
            "experts": float(self.experts),
            "narrow": float(self.narrow),
            "newer": float(self.generation not in WELL_KNOWN),
            "long": max(0.0, math.log2(self.seq_len / _LONG) + 1) if self.seq_len >= _LONG else 0.0,
            "many": max(0.0, math.log2(self.nodes / _MANY) + 1) if self.nodes >= _MANY else 0.0,
            "network": float(self.nodes > 1),
            "pipeline": float(self.stages > 1),
        }


def generation(device: str) -> str:
    """Return the make of a device by its name; "" where no run on its kind was published."""
    name = device.rstrip("*")
    return next((make for make, names in _GENERATIONS if name.startswith(names)), "")


def error_context(job: Job, cluster: ClusterSpec, precision: str, stages: int, num_devices: int) -> ErrorContext:
    """Return the circumstances of one plan.

    Args:
        job: model, sequence and batch.
        cluster: gives device and size of a node.
        precision: of the plan.
        stages: of its pipeline.
        num_devices: that it uses.
    """
    return ErrorContext(
        generation=generation(cluster.device.name),
        experts=job.shape.moe_layers > 0,
        narrow=precision in ("fp8", "fp4"),
        seq_len=job.seq_len,
        nodes=-(-num_devices // cluster.devices_per_node),
        stages=stages,
        decoder=_is_decoder(job.shape),
        adapter=job.adapter is not None,
    )


def _is_decoder(shape: Shape) -> bool:
    if not isinstance(shape, TracedShape):
        return True
    attention = shape.traced.attention
    return shape.vocab > 0 and attention is not None and attention.causal


def unmeasured(one: ErrorContext, device: str) -> tuple[str, ...]:
    """Return what no published run was like, in words; empty where there were some of every kind."""
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


# Bands and chances from residuals: how wide they are under which circumstances, and the quantiles that they need.

Array = NDArray[np.float64]

#: Shares of cases that bands are made to hold.
LEVELS = (0.5, 0.8, 0.95)
TIME_DOUBTS = ("experts", "narrow", "newer", "long", "many", "network", "pipeline")
MEMORY_DOUBTS = ("experts", "newer")


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """How a scale grows with the circumstances: `spread` where there is no doubt, times exp(weight) for each."""

    spread: float
    weights: Mapping[str, float]

    def scale(self, one: ErrorContext) -> float:
        """Return the scale of a residual."""
        doubts = one.uncertainty_terms
        return self.spread * math.exp(sum(weight * doubts[name] for name, weight in self.weights.items()))


@dataclass(frozen=True, slots=True)
class Band:
    """Factors on an estimate between which the measured value lies in `level` of all cases."""

    level: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What published runs taught of the errors. quantiles: lower and upper by level, in units of the scale.

    gross, gross_spread: share of memory estimates that are wrong altogether, and how far.
    runs, sources: that the time was learnt from.
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
    """Return the experience that comes with the package."""
    text = Path(__file__).with_name("experience.toml").read_text(encoding="utf-8")
    return experience_of(tomllib.loads(text))


def experience_of(table: Mapping[str, Any]) -> Experience:
    """Return the experience of a table like that of experience.toml."""
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
    """Return the bands of a step time by level, as factors on the estimate."""
    known = shipped() if known is None else known
    scale = known.time.scale(one)
    return {
        level: Band(level, math.exp(low * scale), math.exp(high * scale))
        for level, (low, high) in known.quantiles.items()
    }


def memory_spread(job: Job, cluster: ClusterSpec) -> float:
    """Return the scale of the errors of memory for a job on a cluster, as a logarithm."""
    return shipped().memory.scale(error_context(job, cluster, "bf16", 1, cluster.num_devices))


def fits_chance(room: Array, spread: float, known: Experience | None = None) -> Array:
    """Return the chance of each plan to run without falling short of memory.

    Most estimates are off by little, some by much: an allocator that fragments, a loss that is not what was thought.

    Args:
        room: log(usable / needed) of each plan.
        spread: scale of the residuals of memory, as `Experience.memory` has it for the circumstances.
        known: where not the shipped one.
    """
    known = shipped() if known is None else known
    near, far = _logistic(room / spread), _logistic(room / known.gross_spread)
    return (1 - known.gross) * near + known.gross * far


def _logistic(deviations: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-1.702 * np.clip(deviations, -40, 40)))  # the logistic curve nearest to the normal one
