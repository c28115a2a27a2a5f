"""Predictions of published runs under three tiers, and everything that is said of their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.planner.cost.machine import TIERS, Tables
from weft.planner.scoring.fill import predict
from weft.planner.scoring.metrics import summary
from weft.planner.scoring.prediction import Prediction
from weft.planner.scoring.runs import PublishedRun, Skipped, read_runs
from weft.planner.scoring.scalars import stack_scalars

#: Tiers of a score: those of the tables, and one scalar per software stack on top.
SCORE_TIERS = (*TIERS, "stack")


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Everything that `weft plan --score` says. predictions: one per run and tier."""

    predictions: Sequence[Prediction]
    skipped: Sequence[Skipped]

    def summary(self) -> dict[str, Any]:
        """Return the errors by tier, of time, memory and verdicts."""
        return {
            **{tier: summary([each for each in self.predictions if each.tier == tier]) for tier in SCORE_TIERS},
            "num_runs": len(self.predictions) // len(SCORE_TIERS),
            "num_skipped": len(self.skipped),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; absent numbers are None."""
        return {
            "rows": [_row(each) for each in self.predictions],
            "skipped": [{"id": each.id, "reason": each.reason} for each in self.skipped],
            "summary": self.summary(),
        }


def score(path: Path | str) -> ScoreReport:
    """Predict all runs of a CSV file.

    Raises:
        ConfigError: for a file that cannot be read, or a run that it does not describe whole.
    """
    runs, skipped = read_runs(path)
    predictions = [predict_run(run, tier) for tier in TIERS for run in runs]
    tables = [each for each in predictions if each.tier == TIERS[-1]]
    scalars = stack_scalars(tables)
    scaled = [replace(each, tier="stack", step_s=each.step_s * scalars[each.run.id]) for each in tables]
    return ScoreReport(predictions + scaled, skipped)


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
