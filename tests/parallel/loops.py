"""Small models and user-style training loops for tests on ranks."""

from __future__ import annotations

import copy

import torch
from torch import nn

from weft.comm.mesh import Mesh, build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel

STAGES = ("dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2")


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def rows(index: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return batch `index` of 4 samples, or the half of rank 0 or 1."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index), dtype=torch.float64).to(dtype)
    return x if rank is None else x[rank * 2 : rank * 2 + 2]


class Fork(nn.Module):
    """Two branches. Each call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(self.stem(x).tanh())


def fork() -> Fork:
    torch.manual_seed(1)
    return Fork().double()


def laid_out(plan_text: str, model: nn.Module, **options: object) -> tuple[nn.Module, Mesh]:
    """Apply `parallelize` on the current ranks."""
    mesh = build_mesh(Plan.parse(plan_text))
    if options:
        from weft.parallel.state.gradients import attach
        from weft.parallel.zero_flat.model import FlatModel

        attach(model, FlatModel(model, mesh, **options))
        return model, mesh
    return parallelize(model, mesh), mesh


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full master weights by name."""
    return {name: weight.detach().clone() for name, weight in data_parallel(model).weights()}


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in copy.deepcopy(model).named_parameters()}
