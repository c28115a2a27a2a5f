"""Errors of predictions over published runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.planner.scoring.fill import predict
from weft.planner.scoring.runs import Run, Skipped, read_runs
from weft.planner.tables import TIERS, Tables


@dataclass(frozen=True, slots=True)
class Prediction:
    """One run under one tier."""

    run: Run
    tier: str
    step_s: float
    memory_gib: float
    fits_probability: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `weft plan --score` says."""

    predictions: list[Prediction]
    skipped: list[Skipped]


def score(path: Path | str) -> Report:
    """Predict all runs of a CSV file. Raises ConfigError."""
    runs, skipped = read_runs(path)
    predictions = [predict_run(run, tier) for tier in TIERS for run in runs]
    return Report(predictions, skipped)


def predict_run(run: Run, tier: str) -> Prediction:
    """One run by the constants of one tier."""
    estimates, row = predict(run, Tables.of(run.cluster.device, tier))
    memory = {"allocated": estimates.allocated_bytes, "reserved": estimates.reserved_bytes}
    gib = float(memory.get(run.counter, estimates.total_bytes)[row]) / 2**30
    return Prediction(run, tier, float(estimates.step_s[row]), gib, float(estimates.fits_probability[row]))
