"""Work of one rank among thousands at start and in a step does not grow with their number.

torch's fake process group returns without communication, so one process can be any rank.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.buckets import ALIGNMENT
from weft.parallel.zero_flat.model import FlatModel
from weft.train.step.train_step import TrainStep

FEW, MANY = 64, 8192
PLANS = [
    "dp_replicate={world}",
    "dp_shard={world} zero=1",
    "dp_replicate={replicas} dp_shard=8 zero=2",
    "dp_replicate={replicas} dp_shard=8 zero=3",
]


class CallCounter:
    """Count function calls inside `with`."""

    def __enter__(self) -> CallCounter:
        self.calls = Counter[str]()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, called: object) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.calls[called.__name__] += 1


def start_and_step(plan: str, world: int) -> tuple[int, int, Counter[str], list[int]]:
    """Return function calls of a rank's start and second step, bytes sent at start, and bucket sizes."""
    moved = Counter[str]()
    dist.init_process_group("fake", store=FakeStore(), rank=world // 3, world_size=world)
    try:
        text = plan.format(world=world, replicas=world // 8)
        gc.disable()  # garbage collection would call functions of other tests
        with CallCounter() as start:
            mesh = build_mesh(Plan.parse(text), record=lambda axis, kind, size, *_: moved.update({kind: size}))
            model = nn.Sequential(nn.Embedding(200, 16), *(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 200))
            parallelize(model, mesh)
            step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, mesh, max_grad_norm=1.0)
        started = Counter(moved)
        ids = torch.arange(8).view(2, 4)
        step(ids)
        with CallCounter() as second:
            step(ids)
        engine = data_parallel(model)
        buckets = engine.reducer.buckets if isinstance(engine, FlatModel) else []
        return sum(start.calls.values()), sum(second.calls.values()), started, [bucket.size for bucket in buckets]
    finally:
        gc.enable()
        dist.destroy_process_group()


def loss_fn(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), batch.numel()


#: torch 2.13 warns of a unit whose output is a view. Nothing writes to it.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("plan", PLANS)
def test_start_and_step_do_not_grow_with_world_size(plan):
    for world in (FEW, MANY):
        start_and_step(plan, world)  # imports, and torch's one-time initialization
    start, step, moved, few = start_and_step(plan, FEW)
    start_of_many, step_of_many, moved_by_many, many = start_and_step(plan, MANY)
    assert step_of_many <= 1.05 * step
    assert start_of_many <= 1.05 * start
    for kind in moved_by_many:
        assert moved_by_many[kind] <= moved[kind] + 4 * len(many) * ALIGNMENT * MANY, kind
    # Shards are equal and aligned, so padding is bounded per bucket, and the number of buckets is constant.
    assert len(many) == len(few)
    assert all(more <= fewer + ALIGNMENT * MANY for more, fewer in zip(many, few, strict=True))
