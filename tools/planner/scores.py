"""Scores of predictions on published runs: settings that a table omits, stack scalars, refits, and the report.

A missing setting is assumed to be the best choice: the fastest candidate that fits into memory, by the same model. If
no candidate fits, it is the fastest one among those with nearly the least memory.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.planner.metrics import (
    FAMILIES,
    Prediction,
    Residual,
    constant_rate,
    context,
    coverage,
    experience,
    families,
    memory_residuals,
    scored,
    summary,
    time_errors,
    time_residuals,
)
from tools.planner.published_runs import PublishedRun, Skipped, read_runs
from weft.config.plan import RECOMPUTES, SCHEDULES
from weft.planner.cost.machine import TIERS, Tables
from weft.planner.cost.step import TERMS
from weft.planner.estimator import Estimates, estimate
from weft.planner.space.columns import PRECISIONS, Columns
from weft.planner.uncertainty import Experience

_MICROBATCHES = (1, 2, 4, 8, 16)
_VIRTUAL = tuple(range(1, 13))
#: If no candidate fits, candidates with at most this ratio to the least memory are considered.
_NEAR_LEAST = 1.1
#: Layers that embedding and head may count as when stages are filled.
_ENDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """One recompute setting.

    Attributes:
        share: share of the layers.
        budget: share of the bytes without recompute, as the cheapest mix of kernels keeps it; inf without a budget.
    """

    name: str
    share: float = 1.0
    budget: float = math.inf


_STATED = {"half": RecomputeChoice("full", 0.5), "experts": RecomputeChoice("none", budget=0.4)} | {
    name: RecomputeChoice(name) for name in ("none", "attention", "selective", "full")
}
#: From none to full in steps, since recipes recompute single kernels or a number of layers.
_NOT_STATED = (
    RecomputeChoice("none"),
    *(RecomputeChoice("none", budget=kept) for kept in (0.85, 0.7, 0.55, 0.4)),
    *(RecomputeChoice("full", share) for share in (0.25, 0.5, 0.75, 1.0)),
)


def candidates(run: PublishedRun) -> Columns:
    """Return the plans that are consistent with the row; one plan if the row is complete."""
    per_rank = max(1, run.job.global_batch // run.dp)
    layers = run.job.shape.layers
    sizes = (1,) if run.job.shape.moe_layers else _MICROBATCHES  # each token's activations are there top_k times
    micros = (run.microbatch,) if run.microbatch else tuple(b for b in sizes if per_rank % b == 0) or (1,)
    chunks = tuple(v for v in _VIRTUAL if any((layers + ends) % (run.pp * v) == 0 for ends in _ENDS))
    chunks = tuple(v for v in chunks if v > 1) or chunks if run.interleaved else chunks
    stages = (run.virtual_stages,) if run.virtual_stages else chunks or (1,)
    policies = (_STATED[run.recompute],) if run.recompute else (*_NOT_STATED, *_scores(run))
    zeros = (run.zero,) if run.zero is not None else (0, 1, 2)
    experts = (run.ep,) if run.ep is not None else _expert_groups(run)
    rows = [
        (b, v, r, z, e)
        for b, v, r, z, e in itertools.product(micros, stages, policies, zeros, experts)
        if v == 1 or (per_rank // b) % run.pp == 0
    ]
    rows = rows or [(micros[0], 1, policies[0], zeros[0], experts[0])]
    micro, virtual, policy, zero, ep = zip(*rows, strict=True)
    micro, zero = np.minimum(np.array(micro), per_rank), np.array(zero)
    shard = np.where(zero == 0, 1, run.shard)
    return Columns.make(
        len(rows),
        pp=run.pp,
        dp_replicate=run.dp // shard,
        dp_shard=shard,
        cp=run.cp,
        tp=run.tp,
        ep=ep,
        zero=zero,
        sp=run.sp,
        schedule=[SCHEDULES.index("interleaved" if v > 1 else "1f1b") for v in virtual],
        virtual_stages=virtual,
        microbatch=micro,
        num_micro=np.maximum(1, per_rank // micro),
        recompute=[RECOMPUTES.index(each.name) for each in policy],
        recompute_share=[each.share for each in policy],
        activation_budget=[each.budget for each in policy],
        precision=PRECISIONS.index(run.precision),
        compile=run.compile,
        reshard=0,
        offload_optimizer=1.0 if run.host_optimizer else 0.0,
        offload_activations=1.0 if run.host_activations else 0.0,
    )


def _expert_groups(run: PublishedRun) -> tuple[int, ...]:
    """Return the possible expert-parallel sizes of a run that does not specify it."""
    ranks, experts = run.dp * run.cp * run.tp, run.job.shape.num_experts
    return tuple(e for e in (2**power for power in range(8)) if ranks % e == 0 and experts % e == 0)


def _scores(run: PublishedRun) -> tuple[RecomputeChoice, ...]:
    """Return recompute of attention scores only, if scores are saved."""
    return () if run.job.stack.flash else (RecomputeChoice("attention"),)


def predict(run: PublishedRun, tables: Tables) -> tuple[Estimates, int]:
    """Return the estimates of a run's candidates, and the index of the assumed one."""
    columns = candidates(run)
    estimates = estimate(run.job, run.cluster, columns, tables)
    if len(columns) == 1:
        return estimates, 0
    fits = estimates.fits_probability > 0.5
    if not fits.any():  # the run was possible: then memory is taken too high, of all candidates alike
        fits = estimates.total_bytes <= _NEAR_LEAST * estimates.total_bytes.min()
    return estimates, int(np.argmin(np.where(fits, estimates.step_s, np.inf)))


# One scalar for each software stack, fitted without the table to which it is applied.

#: Weight of another source with the same stack, relative to one table of the same source.
_OTHER_SOURCE = 0.05
#: Weight of the prior "no scalar", in tables. With little evidence, the scalar stays near 1.
_PRIOR = 0.3
#: Maximum contribution of a table to a scalar, as a logarithm. Beyond it, something else is wrong with the table.
_MOST = 0.2


def stack_scalars(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return a factor on the predicted step time of each run, by its id.

    A table contributes the median of log(measured / predicted) over its configurations. The scalar of a stack is the
    weighted mean over the other tables of the run's source and over the other sources with its stack (each by the
    median of its tables), shrunk towards 1.
    """
    tables = _tables(predictions)
    factors = {own: _factor(own, tables) for own in {_key(each) for each in predictions}}
    return {each.run.id: factors[_key(each)] for each in predictions}


def _factor(own: tuple[str, str, str], tables: Mapping[tuple[str, str, str], float]) -> float:
    near = [median for key, median in tables.items() if key[:2] == own[:2] and key != own]
    far: dict[str, list[float]] = defaultdict(list)
    for (stack, source, _), median in tables.items():
        if stack == own[0] and source != own[1]:
            far[source].append(median)
    votes = [statistics.median(medians) for medians in far.values()]
    total = sum(map(_clipped, near)) + _OTHER_SOURCE * sum(map(_clipped, votes))
    return math.exp(total / (_PRIOR + len(near) + _OTHER_SOURCE * len(far)))


def _clipped(ratio: float) -> float:
    return min(_MOST, max(-_MOST, ratio))


def _key(each: Prediction) -> tuple[str, str, str]:
    return each.run.job.stack.name, each.run.source, each.run.table


def _tables(predictions: Sequence[Prediction]) -> dict[tuple[str, str, str], float]:
    """Return the median log ratio of each table with measured times, over marked runs only if any run is marked."""
    ratios: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    some_core = any(each.run.core for each in predictions)
    for each in predictions:
        if each.run.measured_s and (each.run.core or not some_core):
            ratios[_key(each)][each.run.group].append(math.log(each.run.measured_s / each.step_s))
    return {
        key: statistics.median(statistics.fmean(group) for group in groups.values()) for key, groups in ratios.items()
    }


# Refit of the fitted constants without a source or a kind of runs, to measure errors on unseen runs.

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Prior standard deviations of the logarithms of factors: of terms, of makes and formats, of software stacks.
_TERM_SD, _MAKE_SD, _STACK_SD = 0.075, 0.04, 0.03
#: Error of one run, as a logarithm, and the error from which on a run has less weight.
_NOISE, _ROBUST = 0.1, 0.15
#: Maximum weight of a source, in configurations.
_SOURCE_RUNS = 6.0
_STEPS = 8
#: Sources that contribute less than this share of the information on a factor are not listed for it.
_WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Factor:
    """One fitted factor.

    Attributes:
        value: its value with all sources.
        sources: sources that determine it, by their share of the information, largest first.
        prior: share of the prior.
    """

    name: str
    value: float
    sources: tuple[tuple[str, float], ...]
    prior: float


@dataclass(frozen=True, slots=True)
class Refit:
    """Predicted seconds by run id.

    Attributes:
        seen: with all sources.
        source_out: without the run's source.
        family_out: by kind, without all runs of the kind.
    """

    seen: dict[str, float]
    source_out: dict[str, float]
    family_out: dict[str, dict[str, float]]
    factors: tuple[Factor, ...]


def refit(predictions: Sequence[Prediction]) -> Refit:
    """Fit the factors to the runs with measured times: to all, and to all except each source and each kind.

    Args:
        predictions: predictions of scored runs, one for each run.
    """
    measured = [each for each in predictions if each.run.measured_s]
    if not measured:
        return Refit({}, {}, {}, ())
    data = _Data.of(measured)
    names = [each.run.id for each in measured]
    everything = np.ones(len(measured), dtype=np.bool_)
    all_in = data.fit(everything)
    without: Array = np.zeros(len(measured))
    for source in sorted(set(data.sources)):
        here = np.array([each == source for each in data.sources])
        without[here] = data.predicted(data.fit(~here))[here]
    out: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        here = np.array([family in families(each.run) for each in measured])
        if here.any() and not here.all():
            times = np.exp(data.predicted(data.fit(~here)))
            out[family] = {name: float(times[row]) for row, name in enumerate(names) if here[row]}
    return Refit(
        seen=dict(zip(names, np.exp(data.predicted(all_in)).tolist(), strict=True)),
        source_out=dict(zip(names, np.exp(without).tolist(), strict=True)),
        family_out=out,
        factors=data.factors(all_in),
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """Measured and predicted times of runs for the fit.

    Attributes:
        seconds: predicted seconds by run and term.
        marks: 1 if a factor of a make, a format or software applies to a run.
    """

    sources: list[str]
    groups: list[tuple[str, str]]
    measured: Array
    seconds: Array
    marks: Array
    names: list[str]
    sds: Array

    @classmethod
    def of(cls, runs: Sequence[Prediction]) -> _Data:
        facts = [context(each.run) for each in runs]
        marks: dict[str, tuple[list[float], float]] = {}

        def mark(name: str, holds: Callable[[int], bool], sd: float) -> None:
            column = [float(holds(row)) for row in range(len(runs))]
            if any(column) and not all(column):
                marks[name] = (column, sd)

        for make in sorted({one.generation for one in facts}):
            mark(f"device {make or 'other'}", lambda row, make=make: facts[row].generation == make, _MAKE_SD)
        mark("experts", lambda row: facts[row].experts, _MAKE_SD)
        mark("fp8", lambda row: runs[row].run.precision == "fp8", _MAKE_SD)
        mark("fp4", lambda row: runs[row].run.precision == "fp4", _MAKE_SD)
        for stack in sorted({each.run.job.stack.name for each in runs}):
            mark(f"software {stack}", lambda row, stack=stack: runs[row].run.job.stack.name == stack, _STACK_SD)
        columns = [column for column, _ in marks.values()]
        return cls(
            sources=[each.run.source for each in runs],
            groups=[(each.run.source, each.run.group) for each in runs],
            measured=np.log([each.run.measured_s or 1.0 for each in runs]),
            seconds=np.array([[each.terms.get(term, 0.0) for term in TERMS] for each in runs]),
            marks=np.array(columns).T if columns else np.zeros((len(runs), 0)),
            names=[*TERMS, *marks],
            sds=np.array([_TERM_SD] * len(TERMS) + [sd for _, sd in marks.values()]),
        )

    def predicted(self, logs: Array) -> Array:
        """Return the logarithms of the seconds of each run, for given logarithms of the factors."""
        terms = len(TERMS)
        return np.log(self.seconds @ np.exp(logs[:terms])) + self.marks @ logs[terms:]

    def _weights(self, rows: Mask) -> Array:
        """Return the weights of runs: 1 per configuration, at most _SOURCE_RUNS per source."""
        repeats = Counter(group for group, row in zip(self.groups, rows, strict=True) if row)
        sizes = Counter(source for source, _ in repeats)
        weights = [
            min(1.0, _SOURCE_RUNS / sizes[source]) / repeats[source, group] if row else 0.0
            for (source, group), row in zip(self.groups, rows, strict=True)
        ]
        return np.array(weights)

    def _slopes(self, logs: Array) -> Array:
        scaled = self.seconds * np.exp(logs[: len(TERMS)])
        return np.concatenate([scaled / scaled.sum(axis=1, keepdims=True), self.marks], axis=1)

    def fit(self, rows: Mask) -> Array:
        """Fit by Gauss-Newton steps with a robust loss, which grows linearly for large errors."""
        logs = np.zeros(len(self.names))
        base = self._weights(rows)
        for _ in range(_STEPS):
            slopes, error = self._slopes(logs), self.measured - self.predicted(logs)
            weights = base / np.maximum(1.0, np.abs(error) / _ROBUST)
            left = slopes.T @ (slopes * weights[:, None]) / _NOISE**2 + np.diag(1 / self.sds**2)
            right = slopes.T @ (weights * error) / _NOISE**2 - logs / self.sds**2
            logs = logs + np.clip(np.linalg.solve(left, right), -0.3, 0.3)
        return logs

    def factors(self, logs: Array) -> tuple[Factor, ...]:
        """Return every factor, with each source's share of the information on it."""
        slopes = self._slopes(logs)
        weights = self._weights(np.ones(len(self.sources), dtype=np.bool_))
        known = slopes**2 * weights[:, None] / _NOISE**2
        found: list[Factor] = []
        for column, name in enumerate(self.names):
            by_source: Counter[str] = Counter()
            for source, part in zip(self.sources, known[:, column].tolist(), strict=True):
                by_source[source] += part
            prior = 1 / float(self.sds[column]) ** 2
            whole = prior + sum(by_source.values())
            shares = [(source, part / whole) for source, part in by_source.most_common() if part >= _WORTH * whole]
            found.append(Factor(name, float(np.exp(logs[column])), tuple(shares), prior / whole))
        return tuple(found)


# Predictions of published runs under three tiers, and the report on their errors.

#: Tiers of a score: the tables' tiers, and one with a scalar per software stack.
SCORE_TIERS = (*TIERS, "stack")
#: All runs, as a kind of runs.
EVERY = "all"


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Report of `tools/planner/score.py`.

    Attributes:
        predictions: one per run and tier.
        refitted: predictions of the tables with refitted constants.
    """

    predictions: Sequence[Prediction]
    skipped: Sequence[Skipped]
    refitted: Refit

    def of_tier(self, tier: str) -> list[Prediction]:
        """Return the predictions of one tier."""
        return [each for each in self.predictions if each.tier == tier]

    def foresight(self) -> dict[str, Any]:
        """Return the errors by kind of runs: shipped, refitted to all, without the source, without the kind."""
        tables = scored(self.of_tier(TIERS[-1]))
        return {name: self._observed(_of_family(tables, name), name) for name in (EVERY, *FAMILIES)}

    def _observed(self, runs: Sequence[Prediction], family: str) -> dict[str, Any]:
        found = {
            "shipped": time_errors(runs),
            "refitted": time_errors(_with_times(runs, self.refitted.seen)),
            "source_out": time_errors(_with_times(runs, self.refitted.source_out)),
            "constant_rate": time_errors(_with_times(runs, constant_rate(scored(self.of_tier(TIERS[-1]))))),
        }
        out = self.refitted.family_out.get(family)
        return found | ({"family_out": time_errors(_with_times(runs, out))} if out else {})

    def residuals(self) -> tuple[list[Residual], list[Residual]]:
        """Return the residuals of time, predicted without the run's source, and of memory."""
        tables = self.of_tier(TIERS[-1])
        return time_residuals(scored(tables), self.refitted.source_out), memory_residuals(tables)

    def experience(self) -> Experience:
        """Return the error statistics: the content of `planner/experience.toml`."""
        return experience(*self.residuals())

    def summary(self) -> dict[str, Any]:
        """Return the errors of time, memory and verdicts by tier, and the errors on unseen runs."""
        return {
            **{tier: summary(self.of_tier(tier)) for tier in SCORE_TIERS},
            "foresight": self.foresight(),
            "coverage": {str(level): held for level, held in coverage(self.residuals()[0]).items()},
            "num_runs": len(self.predictions) // len(SCORE_TIERS),
            "num_skipped": len(self.skipped),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, with None for missing numbers."""
        return {
            "rows": [_row(each) for each in self.predictions],
            "skipped": [{"id": each.id, "reason": each.reason} for each in self.skipped],
            "summary": self.summary(),
            "source_out_iter_s": self.refitted.source_out,
            "fitted": [
                {"name": each.name, "value": each.value, "start": each.prior, "sources": dict(each.sources)}
                for each in self.refitted.factors
            ],
        }


def score(*paths: Path | str) -> ScoreReport:
    """Predict all runs of CSV files.

    Raises:
        ConfigError: for a file that cannot be read, or a run that is not fully described.
    """
    runs: list[PublishedRun] = []
    skipped: list[Skipped] = []
    for path in paths:
        found, without = read_runs(path)
        runs += found
        skipped += without
    once: dict[tuple[PublishedRun, str], Prediction] = {}
    predictions = [_once(run, tier, once) for tier in TIERS for run in runs]
    tables = [each for each in predictions if each.tier == TIERS[-1]]
    scalars = stack_scalars(tables)
    scaled = [replace(each, tier="stack", step_s=each.step_s * scalars[each.run.id]) for each in tables]
    return ScoreReport(predictions + scaled, skipped, refit(scored(tables)))


def _once(run: PublishedRun, tier: str, known: dict[tuple[PublishedRun, str], Prediction]) -> Prediction:
    """Return a run's prediction. Runs with the same settings are predicted only once."""
    bare = replace(run, id="", table="", group="", core=False, measured_s=None, measured_gib=None, out_of_memory=None)
    found = known.get((bare, tier))
    if found is None:
        found = known[bare, tier] = predict_run(run, tier)
    return replace(found, run=run)


def _of_family(predictions: Sequence[Prediction], family: str) -> list[Prediction]:
    return [each for each in predictions if family == EVERY or family in families(each.run)]


def _with_times(predictions: Sequence[Prediction], seconds: Mapping[str, float]) -> list[Prediction]:
    return [replace(each, step_s=seconds[each.run.id]) for each in predictions if each.run.id in seconds]


def predict_run(run: PublishedRun, tier: str) -> Prediction:
    """Predict one run with the constants of one tier."""
    estimates, row = predict(run, Tables.of(run.cluster.device, tier))
    memory = {"allocated": estimates.allocated_bytes, "reserved": estimates.reserved_bytes}
    return Prediction(
        run=run,
        tier=tier,
        step_s=float(estimates.step_s[row]),
        memory_gib=float(memory.get(run.counter, estimates.total_bytes)[row]) / 2**30,
        fits_probability=float(estimates.fits_probability[row]),
        terms={name: float(values[row]) for name, values in estimates.terms.items()},
    )


def _row(each: Prediction) -> Mapping[str, Any]:
    run = each.run
    return {
        "id": run.id,
        "tier": each.tier,
        "predicted_iter_s": _finite(each.step_s),
        "predicted_mem_gib": _finite(each.memory_gib),
        "measured_iter_s": run.measured_s,
        "error": _finite(each.error),
        "fits_probability": _finite(each.fits_probability),
        "source": run.source,
        "table": run.table,
        "stack": run.job.stack.name,
        "core": run.core,
        "group": run.group,
        "measured_mem_gib": run.measured_gib,
        "memory_counter": run.counter or None,
        "out_of_memory": run.out_of_memory,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
