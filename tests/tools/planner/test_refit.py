"""Fitting without a publisher: its own runs never affect its score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tools.planner.metrics import Residual, coverage, experience, experience_text
from tools.planner.published_runs import read_runs
from tools.planner.scores import predict_run, refit
from weft.config.cluster import device
from weft.planner.uncertainty import ErrorContext

SAMPLE = Path(__file__).with_name("sample_runs.csv")


@pytest.fixture(scope="module")
def predictions():
    runs, _ = read_runs(SAMPLE)
    new = device("b200")  # a generation with a correction factor
    moved = [replace(run, cluster=replace(run.cluster, device=new)) for run in runs if run.measured_s]
    return [predict_run(run, "tables") for run in moved]


def slower(predictions, source: str, factor: float):
    return [
        replace(each, run=replace(each.run, measured_s=factor * (each.run.measured_s or 0)))
        if each.run.source == source
        else each
        for each in predictions
    ]


def test_publisher_does_not_affect_its_own_prediction(predictions):
    plain, changed = refit(predictions), refit(slower(predictions, "made", 1.3))
    own = [each.run.id for each in predictions if each.run.source == "made"]
    others = [each.run.id for each in predictions if each.run.source != "made"]
    assert own
    assert others
    for name in own:
        assert changed.publisher_out[name] == pytest.approx(plain.publisher_out[name])
        assert changed.seen[name] > plain.seen[name]
    for name in others:
        assert changed.publisher_out[name] > plain.publisher_out[name]


def sample_residuals(seed: int, wide: float = 1.0) -> list[Residual]:
    """Sample forty sources of ten runs: a bias per source and an error per run, larger for experts."""
    draw = np.random.default_rng(seed)
    found: list[Residual] = []
    for source in range(40):
        experts = source % 4 == 0
        of = ErrorContext(generation="hopper", experts=experts, narrow=False, seq_len=4096, nodes=8)
        bias = draw.normal(0, 0.06)
        found += [
            Residual(f"s{source}", f"s{source}", (wide if experts else 1.0) * (bias + draw.normal(0, 0.06)), of)
            for _ in range(10)
        ]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_bands_cover_excluded_publishers(seed):
    held = coverage(sample_residuals(seed, wide=3.0))
    assert 0.72 <= held["0.8"]["sources"] <= 0.88
    assert held["0.5"]["runs"] < held["0.8"]["runs"] < held["0.95"]["runs"]


def test_less_certain_runs_get_a_wider_scale():
    even, uneven = experience(sample_residuals(0), []), experience(sample_residuals(0, wide=3.0), [])
    assert uneven.time.weights["experts"] > 0.5
    assert even.time.weights.get("experts", 0.0) < 0.3
    assert (uneven.runs, uneven.sources) == (400, 40)


def test_experience_round_trip():
    import tomllib

    from weft.planner.uncertainty import experience_of

    known = experience(sample_residuals(1, wide=2.0), sample_residuals(2))
    again = experience_of(tomllib.loads(experience_text(known)))
    assert again.time.spread == pytest.approx(known.time.spread, abs=1e-4)
    assert again.quantiles[0.8] == pytest.approx(known.quantiles[0.8], abs=1e-3)
    assert again.memory.spread == pytest.approx(known.memory.spread, abs=1e-4)
