"""Scores of predictions on published runs: settings that a table omits, refits, and the report.

A missing setting is assumed to be the best choice: the fastest candidate that fits into memory, by the same model. If
no candidate fits, it is the fastest one among those with nearly the least memory.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tools.planner.finetune import FinetuneResult, FinetuneRun, finetune_summary, predict_finetune
from tools.planner.metrics import (
    FAMILIES,
    Prediction,
    Residual,
    constant_rate,
    coverage,
    experience,
    families,
    kinds_of,
    memory_residuals,
    scored,
    summary,
    time_errors,
    time_residuals,
)
from tools.planner.published_runs import PublishedRun, Skipped, read_rows
from weft.config.plan import RECOMPUTES, SCHEDULES
from weft.errors import ConfigError, Problem
from weft.planner.cost.machine import TIERS, Tables
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
        budget: saved bytes relative to no recompute, reached by recomputing the cheapest kernels; inf: no budget.
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
    if not fits.any():  # the run was possible, so all estimates are too high
        fits = estimates.total_bytes <= _NEAR_LEAST * estimates.total_bytes.min()
    return estimates, int(np.argmin(np.where(fits, estimates.step_s, np.inf)))


# Correction factors by kind of runs, fitted without a publisher, to measure errors on runs of unseen publishers.

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Prior standard deviation of the logarithm of a factor; error of one run; error from which on a run has less weight.
_FACTOR_SD, _NOISE, _ROBUST = 0.1, 0.1, 0.15
#: Maximum weight of a source, in configurations.
_SOURCE_RUNS = 6.0
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Refit:
    """Predicted seconds by run id, each times the factors of its kinds.

    Attributes:
        seen: with all publishers.
        publisher_out: without the run's publisher.
        factors: with all publishers, by kind.
    """

    seen: dict[str, float]
    publisher_out: dict[str, float]
    factors: dict[str, float]


def refit(predictions: Sequence[Prediction]) -> Refit:
    """Fit one factor per kind of device: to all publishers, and to all except each one.

    Args:
        predictions: predictions of runs with measured times, one for each run.
    """
    measured = [each for each in predictions if each.run.measured_s]
    if not measured:
        return Refit({}, {}, {})
    kinds = [kinds_of(each.run) for each in measured]
    names = sorted(set[str]().union(*kinds))
    marks = np.array([[float(name in each) for name in names] for each in kinds])
    errors = np.log([(each.run.measured_s or 1.0) * each.slowdown / each.step_s for each in measured])
    publishers = np.array([each.run.publisher for each in measured])
    all_in = _fit(marks, errors, _weights(measured))
    without = np.zeros(len(measured))
    for publisher in sorted(set(publishers.tolist())):
        here = publishers == publisher
        others = [each for each, own in zip(measured, here, strict=True) if not own]
        if others:
            without[here] = marks[here] @ _fit(marks[~here], errors[~here], _weights(others))
    return Refit(
        seen=_corrected(measured, marks @ all_in),
        publisher_out=_corrected(measured, without),
        factors=dict(zip(names, np.exp(all_in).tolist(), strict=True)),
    )


def _corrected(runs: Sequence[Prediction], logs: Array) -> dict[str, float]:
    return {
        each.run.id: each.step_s / each.slowdown * math.exp(log) for each, log in zip(runs, logs.tolist(), strict=True)
    }


def _weights(runs: Sequence[Prediction]) -> Array:
    """Return the weights of runs: 1 per configuration, at most _SOURCE_RUNS per source."""
    repeats = Counter((each.run.source, each.run.group) for each in runs)
    sizes = Counter(source for source, _ in repeats)
    return np.array(
        [min(1.0, _SOURCE_RUNS / sizes[each.run.source]) / repeats[each.run.source, each.run.group] for each in runs]
    )


def _fit(marks: Array, errors: Array, weights: Array) -> Array:
    """Return the logarithms of the factors, with a loss that grows linearly for large errors."""
    logs = cast(Array, np.zeros(marks.shape[1]))
    for _ in range(_STEPS):
        residual: Array = np.abs(errors - marks @ logs)
        now: Array = weights / np.maximum(1.0, residual / _ROBUST) / _NOISE**2
        left: Array = marks.T @ (marks * now[:, None]) + np.eye(marks.shape[1]) / _FACTOR_SD**2
        right: Array = marks.T @ (now * errors)
        logs = cast(Array, np.linalg.solve(left, right))
    return logs


# Predictions of published runs under two tiers, and the report on their errors.

#: All runs, as a kind of runs.
EVERY = "all"


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Report of `tools/planner/score.py`.

    Attributes:
        predictions: one per run and tier.
        refitted: predictions of the tables with refitted constants.
        finetune: predictions of fine-tuning runs.
    """

    predictions: Sequence[Prediction]
    skipped: Sequence[Skipped]
    refitted: Refit
    finetune: Sequence[FinetuneResult] = ()

    def of_tier(self, tier: str) -> list[Prediction]:
        """Return the predictions of one tier."""
        return [each for each in self.predictions if each.tier == tier]

    def foresight(self) -> dict[str, Any]:
        """Return the errors by kind of runs: without the publisher, refitted to all, as shipped."""
        tables = scored(self.of_tier(TIERS[-1]))
        constant = constant_rate(tables)
        found: dict[str, Any] = {}
        for name in (EVERY, *FAMILIES):
            runs = [each for each in tables if name == EVERY or name in families(each.run)]
            found[name] = {
                "publisher_out": time_errors(_with_times(runs, self.refitted.publisher_out)),
                "refitted": time_errors(_with_times(runs, self.refitted.seen)),
                "shipped": time_errors(runs),
                "constant_rate": time_errors(_with_times(runs, constant)),
            }
        return found

    def residuals(self) -> tuple[list[Residual], list[Residual]]:
        """Return the residuals of time, predicted without the run's publisher, and of memory."""
        tables = self.of_tier(TIERS[-1])
        return time_residuals(scored(tables), self.refitted.publisher_out), memory_residuals(tables)

    def experience(self) -> Experience:
        """Return the error statistics: the content of `planner/experience.toml`."""
        return experience(*self.residuals())

    def summary(self) -> dict[str, Any]:
        """Return the errors of time, memory and verdicts by tier, and the errors on unseen runs."""
        return {
            **{tier: summary(self.of_tier(tier)) for tier in TIERS},
            "foresight": self.foresight(),
            "coverage": coverage(self.residuals()[0]),
            "finetune": finetune_summary(self.finetune),
            "num_runs": len(self.predictions) // len(TIERS) + len(self.finetune),
            "num_skipped": len(self.skipped),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, with None for missing numbers."""
        return {
            "rows": [_row(each) for each in self.predictions],
            "skipped": [{"id": each.id, "reason": each.reason} for each in self.skipped],
            "not_understood": {each.run.id: each.run.unread for each in self.of_tier(TIERS[-1]) if each.run.unread},
            "summary": self.summary(),
            "publisher_out_iter_s": self.refitted.publisher_out,
            "factors": self.refitted.factors,
        }


def score(*paths: Path | str) -> ScoreReport:
    """Predict all runs of CSV files.

    Raises:
        ConfigError: for a file that cannot be read, and if no row of any file can be scored.
    """
    runs: list[PublishedRun] = []
    tuned: list[FinetuneResult] = []
    skipped: list[Skipped] = []
    for path in paths:
        for found in read_rows(path):
            if isinstance(found, PublishedRun):
                runs.append(found)
            elif isinstance(found, FinetuneRun):
                tuned.append(predict_finetune(found))
            else:
                skipped.append(found)
    once: dict[tuple[PublishedRun, str], Prediction] = {}
    predictions = [_once(run, tier, once) for tier in TIERS for run in runs]
    tables = [each for each in predictions if each.tier == TIERS[-1]]
    if not predictions and not tuned:
        first = f"The first of {len(skipped)} rows: {skipped[0].reason}" if skipped else "There are no rows"
        raise ConfigError([Problem("score", f"score={paths[0]}: no row can be scored. {first}. Check the columns.")])
    return ScoreReport(predictions, skipped, refit(scored(tables)), tuned)


def _once(run: PublishedRun, tier: str, known: dict[tuple[PublishedRun, str], Prediction]) -> Prediction:
    """Return a run's prediction. Runs with the same settings are predicted only once."""
    plain = {"id": "", "table": "", "group": "", "core": False, "measured_s": None, "measured_gib": None}
    bare = replace(run, **plain, out_of_memory=None, unread=())
    found = known.get((bare, tier))
    if found is None:
        found = known[bare, tier] = predict_run(run, tier)
    return replace(found, run=run)


def _with_times(predictions: Sequence[Prediction], seconds: Mapping[str, float]) -> list[Prediction]:
    return [replace(each, step_s=seconds[each.run.id]) for each in predictions if each.run.id in seconds]


def predict_run(run: PublishedRun, tier: str) -> Prediction:
    """Predict one run with the constants of one tier."""
    tables = Tables.of(run.cluster.device, tier)
    estimates, row = predict(run, tables)
    memory = {"allocated": estimates.allocated_bytes, "reserved": estimates.reserved_bytes}
    return Prediction(
        run=run,
        tier=tier,
        step_s=float(estimates.step_s[row]),
        memory_gib=float(memory.get(run.counter, estimates.total_bytes)[row]) / 2**30,
        fits_probability=float(estimates.fits_probability[row]),
        terms={name: float(values[row]) for name, values in estimates.terms.items()},
        slowdown=tables.slowdown,
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
        "publisher": run.publisher,
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
