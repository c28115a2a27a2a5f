"""Predictions of published runs under three tiers, and everything that is said of their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.planner.cost.machine import TIERS, Tables
from weft.planner.foresight import Experience
from weft.planner.scoring.families import FAMILIES, families
from weft.planner.scoring.fill import predict
from weft.planner.scoring.metrics import constant_rate, scored, summary, time_errors
from weft.planner.scoring.prediction import Prediction
from weft.planner.scoring.refit import Refit, refit
from weft.planner.scoring.residuals import (
    Residual,
    coverage,
    experience,
    memory_residuals,
    time_residuals,
)
from weft.planner.scoring.rows import PublishedRun, Skipped, read_runs
from weft.planner.scoring.scalars import stack_scalars

#: Tiers of a score: those of the tables, and one scalar per software stack on top.
SCORE_TIERS = (*TIERS, "stack")
#: All runs, where kinds of runs are told apart.
EVERY = "all"


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Everything that `weft plan --score` says.

    predictions: one per run and tier. refitted: predictions of the tables with what is fitted, refitted.
    """

    predictions: Sequence[Prediction]
    skipped: Sequence[Skipped]
    refitted: Refit

    def of_tier(self, tier: str) -> list[Prediction]:
        """Return the predictions of one tier."""
        return [each for each in self.predictions if each.tier == tier]

    def foresight(self) -> dict[str, Any]:
        """Return the errors on kinds of runs: shipped, refitted to all, without the source, without the kind."""
        tables = scored(self.of_tier(TIERS[-1]))
        return {name: self._seen_so(_of_family(tables, name), name) for name in (EVERY, *FAMILIES)}

    def _seen_so(self, runs: Sequence[Prediction], family: str) -> dict[str, Any]:
        found = {
            "shipped": time_errors(runs),
            "refitted": time_errors(_with_times(runs, self.refitted.seen)),
            "source_out": time_errors(_with_times(runs, self.refitted.source_out)),
            "constant_rate": time_errors(_with_times(runs, constant_rate(scored(self.of_tier(TIERS[-1]))))),
        }
        out = self.refitted.family_out.get(family)
        return found | ({"family_out": time_errors(_with_times(runs, out))} if out else {})

    def residuals(self) -> tuple[list[Residual], list[Residual]]:
        """Return the residuals of time, of runs whose source took no part, and of memory."""
        tables = self.of_tier(TIERS[-1])
        return time_residuals(scored(tables), self.refitted.source_out), memory_residuals(tables)

    def experience(self) -> Experience:
        """Return what the errors teach: the content of `foresight/experience.toml`."""
        return experience(*self.residuals())

    def summary(self) -> dict[str, Any]:
        """Return the errors by tier, of time, memory and verdicts; and how far off unseen runs are."""
        return {
            **{tier: summary(self.of_tier(tier)) for tier in SCORE_TIERS},
            "foresight": self.foresight(),
            "coverage": {str(level): held for level, held in coverage(self.residuals()[0]).items()},
            "num_runs": len(self.predictions) // len(SCORE_TIERS),
            "num_skipped": len(self.skipped),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; absent numbers are None."""
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
        ConfigError: for a file that cannot be read, or a run that it does not describe whole.
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
    """A run's prediction; that of one which was measured again, or has been predicted already, is not made again."""
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
    """One run by the constants of one tier."""
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
