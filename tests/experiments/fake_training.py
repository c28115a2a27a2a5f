"""A trial that computes a loss by a formula, and a program that sweeps over it."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import weft
from weft.experiments.sweep import run_sweep, sweep_folder
from weft.experiments.sweep_config import read_sweep


def train(item: dict[str, Any]) -> dict[str, Any]:
    """Return a loss that falls with the steps, towards a minimum at lr=1e-3."""
    time.sleep(0.01)
    values = dict(word.partition("=")[::2] for word in item["overrides"])
    lr = float(values.get("optimizer.lr", 1e-3))
    if values.get("schedule.kind") == "linear" or lr > 0.5:
        return {"failed": "the loss is nan", "seconds": 1.0}
    if int(values.get("seed", 0)) >= 700:
        raise RuntimeError("crashed")

    def loss(step: int) -> float:
        return 2.0 + 0.3 * math.log10(lr / 1e-3) ** 2 + 3.0 * math.exp(-step / 40) + 0.01 * float(values.get("seed", 0))

    step = item["step"]
    return {"value": loss(step), "curve": [[step, loss(step)]], "seconds": 2.0, "devices": 2, "kwh": 0.5}


def sweep(file: Path, folder: Path, on: str = "local:2") -> Any:
    config = read_sweep(file)
    with weft.pool(on, retries=10_000) as pool, sweep_folder(config, folder):
        return run_sweep(config, folder, pool, lambda line: None, train="tests.experiments.fake_training:train")


if __name__ == "__main__":
    result = sweep(Path(sys.argv[1]), Path(sys.argv[2]))
    print([(trial.values, trial.curve, trial.state) for trial in result.trials])
