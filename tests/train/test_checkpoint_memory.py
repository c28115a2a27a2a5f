"""Saving and loading need little more memory per rank than its share. Each process's peak is measured."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep

MOST_BESIDE = 256 * 2**20


def resident(what: str) -> int:
    """Return memory of this process in bytes: VmRSS is current, VmHWM the peak since `forget_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peaks(plan_text: str, folder: str, size: int, save: bool) -> tuple[int, int, int]:
    """Return the peak's rise, the bytes of states created by loading, and those of the full model with states."""
    mesh = build_mesh(Plan.parse(plan_text))
    model = parallelize(nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4))), mesh, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, lambda out, batch: (out.square().sum(), len(batch)), mesh)
    if save:
        step(torch.ones(2, size))
        before = forget_peak()
        save_slices(Path(folder), 1, state_slices(model, optimizer), {}, rank_group(mesh))
        states = 0
    else:
        before = forget_peak()
        checkpoint = load_checkpoint(Path(folder) / "step_00000001", lazily=True)
        resume(model, optimizer, checkpoint)
        states = sum(one.flat.nbytes for one in data_parallel(model).state_slices(optimizer))
    return resident("VmHWM") - before, states, 3 * 4 * 4 * size * size


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=1", "dp_shard=2 zero=3"])
def test_peak_memory_is_the_ranks_share_plus_a_margin(plan, tmp_path, ranks2):
    size = 5632  # 1.5 GB of weights and states: a rank with all of them would exceed the bound by far
    for save in (True, False):
        for rose, states, whole in ranks2.run(peaks, plan, str(tmp_path), size, save):
            assert rose <= states + MOST_BESIDE < whole
