"""Bands and chances from residuals: how wide they are under which circumstances, and the quantiles that they need.

A residual is log(measured / predicted) of a run whose source took no part. Its scale is `spread * exp(sum of doubts)`;
a band holds the quantiles of residuals over their scale (conformal prediction with a scale of its own for each case;
Papadopoulos et al. 2008, Lei et al. 2018, arXiv 1604.04173).
"""

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

from weft.planner.foresight.circumstances import Circumstances, circumstances_of
from weft.planner.space import Job
from weft.spec import ClusterSpec

Array = NDArray[np.float64]

#: Shares of cases that bands are made to hold.
LEVELS = (0.5, 0.8, 0.95)
TIME_DOUBTS = ("experts", "narrow", "newer", "long", "many", "network", "pipeline")
MEMORY_DOUBTS = ("experts", "newer")


@dataclass(frozen=True, slots=True)
class Doubts:
    """How a scale grows with the circumstances: `spread` where there is no doubt, times exp(weight) for each."""

    spread: float
    weights: Mapping[str, float]

    def scale(self, one: Circumstances) -> float:
        """Return the scale of a residual."""
        doubts = one.doubts
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

    time: Doubts
    quantiles: Mapping[float, tuple[float, float]]
    memory: Doubts
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
        time=Doubts(time["spread"], time["doubts"]),
        quantiles={float(level): (low, high) for level, (low, high) in time["quantiles"].items()},
        memory=Doubts(memory["spread"], memory["doubts"]),
        gross=memory["gross"],
        gross_spread=memory["gross_spread"],
        runs=time["runs"],
        sources=time["sources"],
    )


def time_bands(one: Circumstances, known: Experience | None = None) -> dict[float, Band]:
    """Return the bands of a step time by level, as factors on the estimate."""
    known = shipped() if known is None else known
    scale = known.time.scale(one)
    return {
        level: Band(level, math.exp(low * scale), math.exp(high * scale))
        for level, (low, high) in known.quantiles.items()
    }


def memory_spread(job: Job, cluster: ClusterSpec) -> float:
    """Return the scale of the errors of memory for a job on a cluster, as a logarithm."""
    return shipped().memory.scale(circumstances_of(job, cluster, "bf16", 1, cluster.num_devices))


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
