"""Matrices that tensor parallelism has cut, whole for the moment in which an optimizer needs them so.

An optimizer says that it can do with parts, by a dict `joins`: of each part that it holds, how it becomes the whole and
the other way round. Its states stay parts; what it must see whole travels once in a step, over the ranks of tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from weft.parallel.placement.axes import AxisMap


@dataclass(frozen=True, slots=True)
class CutJoin:
    """One cut parameter. device: where collectives work."""

    name: str
    axes: AxisMap
    device: torch.device

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of something that is cut as the parameter is. A collective over tp."""
        return self.axes.whole(self.name, part.to(self.device))

    def whole_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """The whole's, the same on all ranks that hold parts of it."""
        return self.axes.whole_shape(self.name, part.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of it."""
        return self.axes.part(self.name, whole)


def join_cut(
    optimizer: torch.optim.Optimizer,
    params: Iterable[tuple[str, nn.Parameter]],
    axes: AxisMap,
    device: torch.device,
) -> None:
    """Tell an optimizer which of the parameters that it must see whole are cut, and how they are joined.

    Args:
        optimizer: an attribute `joins` says that it can do with parts.
        params: those that this rank updates, by name.
        axes: how parameters are placed.
        device: of the collectives.

    Raises:
        ModelError: where the optimizer cannot do with parts.
    """
    cut = {name: param for name, param in params if axes.is_divided(name)}
    joins = getattr(optimizer, "joins", None)
    if joins is None:
        axes.refuse_cut(cut, optimizer)
        return
    axes.refuse_cut((name for name in cut if axes.placement(name).cut != ("tp",)), optimizer)
    joins.clear()
    joins.update((param, CutJoin(name, axes, device)) for name, param in cut.items())
