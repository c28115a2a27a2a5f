"""Federated training of scikit-learn's digits reaches the accuracy of central training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.federated.runs import train
from weft.lazy import named_object

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "federated.py"


@pytest.mark.full
def test_federated_digits_equal_central_training(tmp_path):
    pytest.importorskip("sklearn")
    base, run = named_object(f"{BENCHMARK}:BASE"), named_object(f"{BENCHMARK}:RUN")
    found = []
    (tmp_path / "base.toml").write_text(base)
    for clients in (20, 1):
        file = tmp_path / f"run{clients}.toml"
        file.write_text(run.format(rounds=60, clients=clients, epochs=2, seed=0))
        found.append(train(file, tmp_path / str(clients)).rounds[-1]["accuracy"])
    federated, central = found
    assert central > 0.94
    assert central - federated <= 0.02
