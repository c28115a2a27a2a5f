"""Federated runs in this process, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weft.federated import trainer as trainer_module
from weft.federated.config import FederatedConfig, read_federated
from weft.federated.simulation import FederatedResult, federated_folder, run_federated

TASK = Path(__file__).with_name("point_task.py")
BASE = """
plan = "precision=fp64{plan}"
[task]
name = "{task}:{kind}"
[task.options]
{options}
[train]
global_batch = 8
[optimizer]
name = "sgd"
lr = 0.2
momentum = 0.5
weight_decay = 0.0
max_grad_norm = 0.0
[schedule]
kind = "constant"
warmup_steps = 0
[launch]
device = "cpu"
"""


def write_config(
    folder: Path, text: str, *, kind: str = "Points", options: str = "", settings: Sequence[str] = (), plan: str = ""
) -> Path:
    """Write the two files of a run, and return the federated one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").write_text(BASE.format(task=TASK, kind=kind, options=options, plan=plan))
    file = folder / "run.toml"
    file.write_text(f'config = "base.toml"\nsettings = {list(settings)!r}\n{text}')
    return file


class InProcess:
    """Workers of `run_federated`: this process. stop_after: number of clients before an interruption."""

    def __init__(self, stop_after: int = -1):
        self.left = stop_after

    def map(self, function: str, items: Sequence[Any], folder: Path) -> list[Any]:
        for item in items:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            trainer_module.train_client(item)
        return []


def train(file: Path, out: Path, pool: Any = None) -> FederatedResult:
    """Run a federated file, by default in this process."""
    config: FederatedConfig = read_federated(file)
    with federated_folder(config, out):
        return run_federated(config, out, pool or InProcess(), lambda text: None)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
