"""Error metrics of predictions by kinds of runs, and error statistics learned from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.planner.cells import step_flops
from tools.planner.published_runs import PublishedRun
from weft.planner.uncertainty import (
    LEVELS,
    MEMORY_DOUBTS,
    TIME_DOUBTS,
    WELL_KNOWN,
    ErrorContext,
    ErrorModel,
    Experience,
    error_context,
)

#: Kinds of runs in display order.
FAMILIES = ("dense", "experts", "fp8", "long", "newer device")
_LONG = 16_384


def context(run: PublishedRun) -> ErrorContext:
    """Return the error context of a run."""
    return error_context(run.job, run.cluster, run.precision, run.num_devices)


def families(run: PublishedRun) -> frozenset[str]:
    """Return the kinds that a run belongs to. A model is dense or has experts, and may belong to further kinds."""
    one = context(run)
    found = {"experts" if one.experts else "dense"}
    found |= {"fp8"} if one.narrow else set()
    found |= {"long"} if one.seq_len >= _LONG else set()
    found |= {"newer device"} if one.generation not in {*WELL_KNOWN, "volta"} else set()
    return frozenset(found)


def kinds_of(run: PublishedRun) -> frozenset[str]:
    """Return the kinds with a correction factor that a run belongs to: its device's generation, unless well known."""
    return frozenset({context(run).generation or "other device"} - WELL_KNOWN)


# Predictions of published runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of one run under one tier.

    Attributes:
        memory_gib: memory by the counter that the run names, else all of the device's memory.
        slowdown: shipped factor of the device's generation, which `step_s` includes and a refit replaces.
    """

    run: PublishedRun
    tier: str
    step_s: float
    memory_gib: float
    fits_probability: float
    terms: Mapping[str, float]
    slowdown: float = 1.0

    @property
    def error(self) -> float | None:
        """Relative error of the predicted step time, or None without a measurement."""
        return self.step_s / self.run.measured_s - 1 if self.run.measured_s else None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory, or None without a measurement."""
        return self.memory_gib / self.run.measured_gib - 1 if self.run.measured_gib else None

    @property
    def verdict_is_right(self) -> bool | None:
        """True if the out-of-memory verdict matches the run's outcome, or None if the outcome is unspecified."""
        if self.run.out_of_memory is None:
            return None
        return (self.fits_probability < 0.5) == self.run.out_of_memory


# Metrics over predictions: errors, order, regret, memory, verdicts.

#: Probability from which on a plan is reported to fit with certainty.
SURE = 0.99


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the metrics of one tier.

    Time errors are over runs that are marked for scoring (all, if none is marked), with one value for each
    configuration. `macro` is the mean over sources of their mean absolute errors.
    """
    runs = scored(predictions)
    return {
        "time": time_errors(runs),
        "sources": {source: _errors(errors) for source, errors in sorted(_by_source(runs).items())},
        "kendall_tau": _mean(_taus(runs)),
        "regret": _regret(runs),
        "memory": _memory(predictions),
        "verdicts": _verdicts(predictions),
    }


def time_errors(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the time errors over configurations, and as `macro` the mean over sources of mean absolute errors."""
    by_source = _by_source(predictions)
    every = [error for errors in by_source.values() for error in errors]
    macro = _mean(_mean_absolute(errors) for errors in by_source.values())
    return _errors(every) | {"macro": macro, "sources": len(by_source)}


def _by_source(predictions: Sequence[Prediction]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for (source, _), members in _grouped(predictions).items():
        found[source].append(statistics.fmean(each.error or 0.0 for each in members))
    return found


def scored(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions whose time is scored: the marked runs of each source, or all if none is marked."""
    measured = [each for each in predictions if each.error is not None]
    marking = {each.run.source for each in measured if each.run.core}
    return [each for each in measured if each.run.core or each.run.source not in marking]


def constant_rate(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the predicted seconds by run id of a baseline: every device reaches a fixed share of its peak.

    The share is the median over the other sources with the same device and format, or over all other sources if there
    are no such runs.
    """
    shares = {each.run.id: _share_of_peak(each) for each in predictions}
    found: dict[str, float] = {}
    for each in predictions:
        others = [one for one in predictions if one.run.source != each.run.source]
        alike = [one for one in others if _peak_key(one) == _peak_key(each)] or others
        if alike:
            usual = statistics.median(shares[one.run.id] for one in alike)
            found[each.run.id] = (each.run.measured_s or 0.0) * shares[each.run.id] / usual
    return found


def _peak_key(each: Prediction) -> tuple[str, str]:
    return each.run.cluster.device.name.rstrip("*"), each.run.precision


def _share_of_peak(each: Prediction) -> float:
    """Return the model's FLOPs, without recompute, over the peak's FLOPs in the measured time."""
    run = each.run
    peak = run.cluster.device.peak_flops(run.precision) or run.cluster.device.peak_flops("bf16")
    peak = peak or run.cluster.device.peak_flops("fp16") or 1.0
    flops = step_flops(run.job.shape, run.job.seq_len, float(run.job.global_batch * run.job.seq_len))
    return flops / (peak * run.num_devices * (run.measured_s or 1.0))


def _grouped(predictions: Iterable[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for each in predictions:
        groups[each.run.source, each.run.group].append(each)
    return groups


def _errors(errors: Sequence[float]) -> dict[str, float | int | None]:
    if not errors:
        return {"count": 0, "mean": None, "median": None, "p90": None, "max": None, "bias": None}
    sizes = np.abs(errors)
    return {
        "count": len(errors),
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "max": float(sizes.max()),
        "bias": float(np.mean(errors)),
        **{f"within_{percent}": float((sizes <= percent / 100).mean()) for percent in (10, 15, 20)},
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def _mean_absolute(errors: Sequence[float]) -> float:
    return statistics.fmean(abs(error) for error in errors)


def _taus(predictions: Sequence[Prediction]) -> list[float]:
    """Return Kendall's tau of predicted and measured tokens per device second for each table of at least 3 runs."""
    tables: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for each in predictions:
        tables[each.run.source, each.run.table].append(each)
    return [tau for members in tables.values() if len(members) >= 3 and (tau := _tau(members)) is not None]


def _tau(members: Sequence[Prediction]) -> float | None:
    def speed(each: Prediction, seconds: float) -> float:
        return each.run.job.global_batch * each.run.job.seq_len / (seconds * each.run.num_devices)

    pairs = [(speed(each, each.step_s), speed(each, each.run.measured_s or 1.0)) for each in members]
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in itertools.combinations(pairs, 2) if a[1] != b[1]]
    return float(np.mean(signs)) if signs else None


def _regret(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the relative loss of the plan with the best prediction, in each sweep of plans for one job.

    A sweep is within one table, since tables of one source differ in software.
    """
    sweeps: dict[Any, list[list[Prediction]]] = defaultdict(list)
    for members in _grouped(predictions).values():
        run = members[0].run
        device = run.cluster.device.name
        job = replace(run.job, stack=replace(run.job.stack, selective_kernels=False))  # which is a choice of the plan
        sweeps[run.source, run.table, job, run.precision, run.num_devices, device].append(members)
    regrets: list[float] = []
    for plans in sweeps.values():
        if len(plans) < 2:
            continue
        measured = [statistics.fmean(each.run.measured_s or 0.0 for each in members) for members in plans]
        predicted = [statistics.fmean(each.step_s for each in members) for members in plans]
        regrets.append(measured[predicted.index(min(predicted))] / min(measured) - 1)
    if not regrets:
        return {"sweeps": 0, "mean": None, "max": None, "within_3": None}
    within = sum(regret <= 0.03 for regret in regrets) / len(regrets)
    return {"sweeps": len(regrets), "mean": statistics.fmean(regrets), "max": max(regrets), "within_3": within}


def _memory(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the memory errors by counter, with "unknown" for sources that do not specify it."""
    counters: dict[str, list[float]] = defaultdict(list)
    for each in predictions:
        if each.memory_error is not None:
            counters[each.run.counter or "unknown"].append(each.memory_error)
    return {counter: _errors(errors) for counter, errors in sorted(counters.items())}


def _verdicts(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return accuracy of the out-of-memory verdicts, and precision and recall of "out of memory".

    `sure` counts runs predicted to fit with probability SURE. `surely_wrong` counts the ones that ran out of memory.
    `ran` counts runs with a measured time, and `ran_was_to_fit` those of them that were predicted to fit.
    """
    judged = [each for each in predictions if each.verdict_is_right is not None]
    ran = [each for each in predictions if each.run.out_of_memory is None and each.run.measured_s]
    sure = [each for each in [*judged, *ran] if each.fits_probability > SURE]
    certain = {
        "sure": len(sure),
        "surely_wrong": sum(bool(each.run.out_of_memory) for each in sure),
        "ran": len(ran),
        "ran_was_to_fit": sum(each.fits_probability > 0.5 for each in ran),
    }
    if not judged:
        return {"count": 0, "accuracy": None, "precision": None, "recall": None, **certain}
    short = [each for each in judged if each.fits_probability < 0.5]
    failed = [each for each in judged if each.run.out_of_memory]
    hits = sum(bool(each.run.out_of_memory) for each in short)
    return {
        "count": len(judged),
        "accuracy": sum(bool(each.verdict_is_right) for each in judged) / len(judged),
        "precision": hits / len(short) if short else None,
        "recall": hits / len(failed) if failed else None,
        **certain,
    }


# Error statistics for the next run from errors on unseen runs: growth with the context, and quantiles.

Array = NDArray[np.float64]

#: Maximum weight of a source, in configurations.
_SOURCE_RUNS = 8.0
#: Penalty of an uncertainty term's weight, in runs; and the weights to try.
_RIDGE = 1.5
_WEIGHTS = np.arange(0.0, 1.55, 0.1)
_SWEEPS = 3
#: A memory error beyond this is not a matter of scale: something else is wrong with the estimate.
_GROSS = 0.25
#: Minimum scale of memory errors, and the scale of gross errors.
_LEAST_SPREAD, _GROSS_SPREAD = 0.05, 0.5
#: Share of 155 runs that ran out of memory although the estimate left a fifth of it free.
_LEAST_GROSS = 0.05
#: Level of the error bands whose coverage is reported by kind of runs.
_KIND_LEVEL = 0.8
#: Share of the runs of a kind inside its band, in the fit: more than the level, because others are less alike.
_KIND_HELD = 0.83
_WIDENINGS = 20
#: Counters of memory by torch or the driver. For other names, the source does not specify the counter.
_COUNTERS = ("allocated", "reserved", "total")


@dataclass(frozen=True, slots=True)
class Residual:
    """log(measured / predicted) of one configuration, its publisher, and its error context."""

    source: str
    publisher: str
    error: float
    of: ErrorContext


def time_residuals(predictions: Sequence[Prediction], seconds: Mapping[str, float]) -> list[Residual]:
    """Return one time residual for each configuration.

    Args:
        predictions: predictions of runs.
        seconds: seconds by run id, predicted without the run's publisher.
    """
    groups: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for each in predictions:
        if each.run.measured_s and each.run.id in seconds:
            error = math.log(each.run.measured_s / seconds[each.run.id])
            one = Residual(each.run.source, each.run.publisher, error, context(each.run))
            groups[each.run.source, each.run.group].append(one)
    return [replace(members[0], error=float(np.mean([each.error for each in members]))) for members in groups.values()]


def memory_residuals(predictions: Sequence[Prediction]) -> list[Residual]:
    """Return the memory residuals of runs with a specified counter and microbatch."""
    return [
        Residual(
            each.run.source,
            each.run.publisher,
            math.log(each.run.measured_gib / each.memory_gib),
            context(each.run),
        )
        for each in predictions
        if each.run.measured_gib and each.run.counter in _COUNTERS and each.run.microbatch
    ]


def experience(time: Sequence[Residual], memory: Sequence[Residual]) -> Experience:
    """Fit scales and quantiles to residuals."""
    doubts, quantiles = _fit_bands(time)
    near = [each for each in memory if abs(each.error) < _GROSS]
    short = [each for each in memory if each.error > _GROSS]  # a run that needs less than its estimate does no harm
    gross = _share(memory, short) if memory else 0.0
    spread = _fit_uncertainty(near, MEMORY_DOUBTS) if near else ErrorModel(_LEAST_SPREAD, {})
    return Experience(
        time=doubts,
        quantiles=quantiles,
        memory=ErrorModel(max(_LEAST_SPREAD, spread.spread), spread.weights),
        gross=min(0.2, max(_LEAST_GROSS, gross)),
        gross_spread=_GROSS_SPREAD,
        runs=len(time),
        sources=len({each.source for each in time}),
    )


def coverage(time: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """Return the share of runs inside the bands that are fitted to the other publishers, by level and by kind of runs.

    `sources` is a mean over sources, `runs` is a mean over configurations. Kinds are for the level `_KIND_LEVEL`.
    """
    held: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for publisher in sorted({each.publisher for each in time}):
        others = [each for each in time if each.publisher != publisher]
        if not others:
            continue
        doubts, quantiles = _fit_bands(others)
        for each in time:
            if each.publisher == publisher:
                scaled = each.error / doubts.scale(each.of)
                for level, (low, high) in quantiles.items():
                    kinds = _kinds(each.of) if level == _KIND_LEVEL else ()
                    for name in (str(level), *kinds):
                        held[name][each.source].append(low <= scaled <= high)
    return {
        name: {
            "sources": float(np.mean([np.mean(each) for each in by_source.values()])),
            "runs": float(np.mean([one for each in by_source.values() for one in each])),
        }
        for name, by_source in held.items()
    }


def _kinds(of: ErrorContext) -> list[str]:
    wider = [name for name in TIME_DOUBTS if of.uncertainty_terms[name]]
    return wider if of.experts else ["dense", *wider]


def _fit_bands(residuals: Sequence[Residual]) -> tuple[ErrorModel, dict[float, tuple[float, float]]]:
    """Return the scale of time errors, and their quantiles.

    The quantiles are those of runs without any uncertainty term. A term widens the band until it contains
    _KIND_HELD of the runs with it, as a mean over sources.
    """
    plain = [each for each in residuals if not any(each.of.uncertainty_terms.values())] or list(residuals)
    known = ErrorModel(_fit_uncertainty(plain, ()).spread, {})
    quantiles = _quantiles(plain, known)
    low, high = quantiles[_KIND_LEVEL]

    def lacking(name: str) -> float:
        held: dict[str, list[bool]] = defaultdict(list)
        for each in residuals:
            if each.of.uncertainty_terms[name]:
                held[each.source].append(low <= each.error / known.scale(each.of) <= high)
        return _KIND_HELD - statistics.fmean(map(statistics.fmean, held.values())) if held else 0.0

    for _ in range(_WIDENINGS):
        least = {name: lacking(name) for name in TIME_DOUBTS}
        name = max(least, key=least.__getitem__)
        if least[name] <= 0:
            break
        known = ErrorModel(known.spread, {**known.weights, name: known.weights.get(name, 0.0) + 0.1})
    return known, quantiles


def experience_text(known: Experience) -> str:
    """Return error statistics as the text of experience.toml."""
    lines = [
        "# Written by `tools/planner/score.py FILES --experience FILE`: errors on runs whose publisher took no part."
    ]
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


def _fit_uncertainty(residuals: Sequence[Residual], names: Sequence[str]) -> ErrorModel:
    """Fit the scale by likelihood, with a double exponential density of scaled residuals.

    Uncertainty terms only widen it.
    """
    sizes = np.array([abs(each.error) for each in residuals]) + 0.005
    facts = np.array([[each.of.uncertainty_terms[name] for name in names] for each in residuals])
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
    return ErrorModel(loss(logs)[1], {name: float(weight) for name, weight in zip(names, logs, strict=True) if weight})


def _quantiles(residuals: Sequence[Residual], doubts: ErrorModel) -> dict[float, tuple[float, float]]:
    """Return the lower and upper quantile by level, each source with its weight."""
    scaled = np.array([each.error / doubts.scale(each.of) for each in residuals])
    weights = _source_weights(residuals)
    order = np.argsort(scaled)
    scaled, passed = scaled[order], np.cumsum(weights[order]) / weights.sum()
    found: dict[float, tuple[float, float]] = {}
    for level in LEVELS:
        tail = (1 - level) / 2
        low, high = np.searchsorted(passed, [tail, 1 - tail])
        found[level] = (float(scaled[low]), float(scaled[min(high, len(scaled) - 1)]))
    return found
