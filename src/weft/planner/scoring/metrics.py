"""Figures over predictions: errors, order, regret, memory, verdicts."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weft.planner.scoring.prediction import Prediction
from weft.planner.scoring.rows import step_flops

#: Chance from which on a plan is said to fit.
SURE = 0.99


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Figures of one tier. Errors of time are over runs that are marked for scoring (all, where none is marked),
    one value for each configuration; `macro` is the mean over sources of their mean absolute errors."""
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
    """Return the errors of time over configurations; `macro`: the mean over sources of their mean absolute errors."""
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
    """Return the predictions whose time is scored: of each source the marked runs, or all where it marks none."""
    measured = [each for each in predictions if each.error is not None]
    marking = {each.run.source for each in measured if each.run.core}
    return [each for each in measured if each.run.core or each.run.source not in marking]


def constant_rate(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the seconds by id of the plainest planner: every device reaches one share of its peak, by device and
    format, which is the median of the other sources; of all other runs where there is none."""
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
    """FLOPs of the model over those of the peak in the measured time; recompute is not counted."""
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
    """Kendall's tau of predicted and measured tokens per device second in each table of at least 3 runs."""
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
    """Measured time of the plan that would be chosen over the best, less 1, in each sweep of plans of one job."""
    sweeps: dict[Any, list[list[Prediction]]] = defaultdict(list)
    for members in _grouped(predictions).values():
        run = members[0].run
        device = run.cluster.device.name
        sweeps[run.source, run.job, run.precision, run.num_devices, device].append(members)
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
    """Errors of memory by what was counted; "unknown" where the source does not say."""
    counters: dict[str, list[float]] = defaultdict(list)
    for each in predictions:
        if each.memory_error is not None:
            counters[each.run.counter or "unknown"].append(each.memory_error)
    return {counter: _errors(errors) for counter, errors in sorted(counters.items())}


def _verdicts(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """How often the out-of-memory verdict is right; precision and recall of "falls short". sure: runs that were said to
    fit with SURE; surely_wrong: those of them that fell short. ran: runs that are known to have run."""
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
