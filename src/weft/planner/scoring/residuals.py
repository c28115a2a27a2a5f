"""What errors on unseen runs say of the next one: how they grow with the circumstances, and which quantiles hold.

Everything is learnt from runs whose source took no part in their prediction. Whether the bands hold is tried once more
out of sample: each source against the bands that the others give.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.foresight import LEVELS, MEMORY_DOUBTS, TIME_DOUBTS, Circumstances, Doubts, Experience
from weft.planner.scoring.families import circumstances
from weft.planner.scoring.prediction import Prediction

Array = NDArray[np.float64]

#: A source counts as this many configurations at most.
_SOURCE_RUNS = 8.0
#: What a weight of a doubt costs, in runs; and the values that are tried.
_RIDGE = 1.5
_WEIGHTS = np.arange(0.0, 1.55, 0.1)
_SWEEPS = 3
#: An error of memory beyond this is no matter of scale: something else is wrong with the estimate.
_GROSS = 0.25
#: The least scale of an estimate of memory, and of one that is wrong altogether.
_LEAST_SPREAD, _GROSS_SPREAD = 0.05, 0.5
#: Of 155 runs that ran out of memory, so many were estimated to have a fifth of it to spare.
_LEAST_GROSS = 0.05
#: Memory that has these names was counted by torch or the driver; else a source does not say by what.
_COUNTERS = ("allocated", "reserved", "total")


@dataclass(frozen=True, slots=True)
class Residual:
    """log(measured / predicted) of one configuration, and what it was of."""

    source: str
    error: float
    of: Circumstances


def time_residuals(predictions: Sequence[Prediction], seconds: Mapping[str, float]) -> list[Residual]:
    """Return one residual for each configuration: seconds by id, as predicted without the run's source."""
    groups: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for each in predictions:
        if each.run.measured_s and each.run.id in seconds:
            error = math.log(each.run.measured_s / seconds[each.run.id])
            groups[each.run.source, each.run.group].append(Residual(each.run.source, error, circumstances(each.run)))
    return [
        Residual(members[0].source, float(np.mean([each.error for each in members])), members[0].of)
        for members in groups.values()
    ]


def memory_residuals(predictions: Sequence[Prediction]) -> list[Residual]:
    """Return the residuals of memory where it is known what was counted, and of which microbatch."""
    return [
        Residual(each.run.source, math.log(each.run.measured_gib / each.memory_gib), circumstances(each.run))
        for each in predictions
        if each.run.measured_gib and each.run.counter in _COUNTERS and each.run.microbatch
    ]


def experience(time: Sequence[Residual], memory: Sequence[Residual]) -> Experience:
    """Learn scales and quantiles from residuals."""
    doubts = _doubts(time, TIME_DOUBTS)
    near = [each for each in memory if abs(each.error) < _GROSS]
    short = [each for each in memory if each.error > _GROSS]  # what needs less than was thought does no harm
    gross = _share(memory, short) if memory else 0.0
    spread = _doubts(near, MEMORY_DOUBTS) if near else Doubts(_LEAST_SPREAD, {})
    return Experience(
        time=doubts,
        quantiles=_quantiles(time, doubts),
        memory=Doubts(max(_LEAST_SPREAD, spread.spread), spread.weights),
        gross=min(0.2, max(_LEAST_GROSS, gross)),
        gross_spread=_GROSS_SPREAD,
        runs=len(time),
        sources=len({each.source for each in time}),
    )


def coverage(time: Sequence[Residual]) -> dict[float, dict[str, float]]:
    """Return by level how many runs lie in the bands that the other sources give: a mean over sources (`sources`), and
    over configurations (`runs`)."""
    held: dict[float, dict[str, list[bool]]] = {level: defaultdict(list) for level in LEVELS}
    for source in sorted({each.source for each in time}):
        others = [each for each in time if each.source != source]
        if not others:
            continue
        doubts = _doubts(others, TIME_DOUBTS)
        quantiles = _quantiles(others, doubts)
        for each in time:
            if each.source == source:
                scaled = each.error / doubts.scale(each.of)
                for level, (low, high) in quantiles.items():
                    held[level][source].append(low <= scaled <= high)
    return {
        level: {
            "sources": float(np.mean([np.mean(each) for each in by_source.values()])),
            "runs": float(np.mean([one for each in by_source.values() for one in each])),
        }
        for level, by_source in held.items()
        if by_source
    }


def experience_text(known: Experience) -> str:
    """Return an experience as the text of experience.toml."""
    lines = ["# Written by `weft plan --score FILES --experience FILE`: errors on runs whose source took no part."]
    lines += ["[time]", f"runs = {known.runs}", f"sources = {known.sources}", f"spread = {known.time.spread:.4f}"]
    lines += ["[time.doubts]  # logarithms of what each widens the band by"]
    lines += [f"{name} = {weight:.2f}" for name, weight in known.time.weights.items()]
    lines += ["[time.quantiles]  # of log(measured / predicted) over its scale, by the share of cases between them"]
    lines += [f'"{level}" = [{low:.3f}, {high:.3f}]' for level, (low, high) in known.quantiles.items()]
    lines += ["[memory]", f"spread = {known.memory.spread:.4f}", f"gross = {known.gross:.3f}"]
    lines += [f"gross_spread = {known.gross_spread:.2f}", "[memory.doubts]"]
    lines += [f"{name} = {weight:.2f}" for name, weight in known.memory.weights.items()]
    return "\n".join(lines) + "\n"


def _source_weights(residuals: Sequence[Residual]) -> Array:
    sizes = Counter(each.source for each in residuals)
    return np.array([min(1.0, _SOURCE_RUNS / sizes[each.source]) for each in residuals])


def _share(every: Sequence[Residual], some: Sequence[Residual]) -> float:
    weights = dict(zip(map(id, every), _source_weights(every).tolist(), strict=True))
    return sum(weights[id(each)] for each in some) / sum(weights.values())


def _doubts(residuals: Sequence[Residual], names: Sequence[str]) -> Doubts:
    """The scale by likelihood, where residuals over it have a double exponential density; doubts only widen."""
    sizes = np.array([abs(each.error) for each in residuals]) + 0.005
    facts = np.array([[each.of.doubts[name] for name in names] for each in residuals])
    weights = _source_weights(residuals)

    def loss(logs: Array) -> tuple[float, float]:
        grown = facts @ logs
        spread = float((weights * sizes * np.exp(-grown)).sum() / weights.sum())
        return float((weights * (math.log(spread) + grown)).sum() + _RIDGE * (logs**2).sum()), spread

    logs = np.zeros(len(names))
    for _ in range(_SWEEPS):
        for column in range(len(names)):
            tried: list[tuple[float, float]] = []
            for weight in _WEIGHTS:
                logs[column] = weight
                tried.append((loss(logs)[0], float(weight)))
            logs[column] = min(tried)[1]
    return Doubts(loss(logs)[1], {name: float(weight) for name, weight in zip(names, logs, strict=True) if weight})


def _quantiles(residuals: Sequence[Residual], doubts: Doubts) -> dict[float, tuple[float, float]]:
    """Lower and upper by level. The next run is of a new source, and sources are few: with n of them a tail is cut at
    1 - (1 - tail)(n + 1)/n, as a quantile of n + 1 (Dunn et al. 2018, arXiv 1809.07441), or at half of it."""
    scaled = np.array([each.error / doubts.scale(each.of) for each in residuals])
    weights, count = _source_weights(residuals), len({each.source for each in residuals})
    order = np.argsort(scaled)
    scaled, passed = scaled[order], np.cumsum(weights[order]) / weights.sum()
    found: dict[float, tuple[float, float]] = {}
    for level in LEVELS:
        tail = (1 - level) / 2
        tail = max(tail / 2, tail - (1 - tail) / count)
        low, high = np.searchsorted(passed, [tail, 1 - tail])
        found[level] = (float(scaled[low]), float(scaled[min(high, len(scaled) - 1)]))
    return found
