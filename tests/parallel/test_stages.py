"""Pipeline stages split by hand: one gradient norm, tied ends, and full tensors of all stages on every rank.

Each rank passes on its stage's output by a sum over all stages, which is slow but differentiable.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.full_state import capture, restore
from weft.comm.autograd import copy_to, sum_over
from weft.comm.mesh import Axis, build_mesh
from weft.comm.rank_positions import ENDS
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.placement import Placement
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep

VOCAB, WIDTH, DEPTH = 9, 6, 4
PLANS = ["pp=2", "pp=2 dp_replicate=2", "pp=2 dp_shard=2 zero=2 microbatches=2", "pp=2 dp_shard=2 zero=3", "pp=4"]


class Tied(nn.Module):
    """Layers between an embedding and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(DEPTH)})
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.pp = Axis("pp", 1, 0, (0,))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(len(ids), WIDTH, dtype=torch.float64, requires_grad=True)  # so that all stages run backward
        for stage in range(self.pp.size):
            x = copy_to(sum_over(self.stage(ids, x) if stage == self.pp.rank else 0.0 * x, self.pp), self.pp)
        return self.head(self.frozen(self.norm(x)) + self.shift) if hasattr(self, "head") else x

    def stage(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) if hasattr(self, "embed") else x
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return x


def split_by_hand(model: Tied, pp: Axis) -> dict[str, Placement]:
    model.pp = pp
    for index in range(DEPTH):
        if index * pp.size // DEPTH != pp.rank:
            del model.layers[str(index)]
    if pp.size == 1:
        return {}
    if pp.rank == pp.size - 1:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        del model.embed
        return {"head.weight": Placement(partial=(ENDS,), name="embed.weight")}
    del model.head, model.norm, model.frozen, model.shift
    if pp.rank:
        del model.embed
        return {}
    return {"embed.weight": Placement(partial=(ENDS,))}


def train(plan: str, num_steps: int, groups: object = None) -> tuple[dict, list[float], list[float]]:
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    torch.manual_seed(2)
    model = Tied().double()
    parallelize(model, mesh, placements=split_by_hand(model, mesh["pp"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if not hasattr(model, "head"):
            return 0.0 * output.sum(), 0
        return F.cross_entropy(output, batch["labels"], reduction="sum"), len(output)

    step = TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        forward=lambda model, batch: model(batch["ids"]),
        max_grad_norm=0.3,
        nominal_tokens=16,
    )
    if groups is not None:
        restore(model, optimizer, groups)
    losses, norms = [], []
    for index in range(num_steps):
        ids = torch.randint(VOCAB, (16, 2), generator=torch.Generator().manual_seed(index))
        count = mesh.plan.microbatches_per_step * mesh.data.size
        parts = [{"ids": part[:, 0], "labels": part[:, 1]} for part in ids.chunk(count)][
            mesh.data.rank :: mesh.data.size
        ]
        metrics = step(Microbatches(parts))
        assert metrics.num_tokens == 16
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    found = {group: {n: t.clone() for n, t in tensors.items()} for group, tensors in capture(model, optimizer).items()}
    found["gradients"] = {name: grad.clone() for name, grad in data_parallel(model).gradients()}
    return found, losses, norms


@pytest.mark.parametrize("plan", PLANS)
def test_stages_match_one_process_and_resume_its_state(plan, request):
    ranks = request.getfixturevalue("ranks2" if plan == "pp=2" else "ranks4")
    saved, _, _ = train("", 1)
    want, losses, norms = train("", 2, saved)
    for found, our_losses, our_norms in ranks.run(train, plan, 2, saved):
        assert our_losses == pytest.approx(losses, rel=1e-10)
        assert our_norms == pytest.approx(norms, rel=1e-10)
        for group, tensors in want.items():
            assert found[group].keys() == tensors.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(found[group][name], tensor, rtol=1e-10, atol=1e-13)
