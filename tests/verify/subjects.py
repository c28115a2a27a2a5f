"""Models for `weft verify`, named by package.module:function."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5)) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Mixes(Net):
    """Mix samples of a batch in the second block, so no plan that splits the batch can match one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x) * (1 + x.mean()))
        return self.head(x)


class Rounds(Net):
    """Gradients depend on the batch size; outputs do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = len(x)
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * size)
        return out


class LeavesOut(Net):
    """Has a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 6)


def batch(step: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(size, 6, generator=generator), "labels": torch.randint(3, (size,), generator=generator)}


def net() -> tuple[nn.Module, object]:
    return Net(), batch


def leaves_out() -> tuple[nn.Module, object]:
    return LeavesOut(), batch


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def complex_weight() -> nn.Module:
    return nn.Linear(3, 3, dtype=torch.complex64)


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(torch.zeros(6))


def stream() -> tuple[nn.Module, object]:
    return Net(), DataLoader(Endless())


def mixes() -> tuple[nn.Module, object]:
    return Mixes(), batch


class Noisy(Net):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def noisy() -> tuple[nn.Module, object]:
    return Noisy(), batch


def rounds() -> tuple[nn.Module, object]:
    return Rounds(), batch


def without_data() -> nn.Module:
    return Net()


def no_model() -> int:
    return 3


def raises() -> nn.Module:
    raise ValueError("no weights here")


def with_a_wrong_loss() -> tuple[nn.Module, object, object]:
    return Net(), batch, lambda output, batch: output.sum()
