"""This rank's shards of a module's parameters under fully_shard, and whole tensors made from them.

A parameter of shape (n, ...) is cut along dim 0 into parts of ceil(n / size) rows; the last ranks have fewer rows, or
none. fully_shard keeps it as a DTensor; everything here works on the plain tensor inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm import all_gather
from weft.mesh import Axis


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One parameter's part on this rank. param: fully_shard's DTensor; local: the same memory as a plain parameter."""

    name: str
    param: nn.Parameter
    local: nn.Parameter
    axis: Axis

    @property
    def rows(self) -> int:
        """Rows of the whole parameter on each rank but the last ones."""
        return -(-self.param.shape[0] // self.axis.size)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, as a view."""
        start = min(self.axis.rank * self.rows, tensor.shape[0])
        return tensor[start : start + self.local.shape[0]]

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from a tensor like `local` on each rank. A collective over the shard axis."""
        shape = self.param.shape
        padded = local
        if local.shape[0] != self.rows:
            padded = local.new_zeros(self.rows, *shape[1:])
            padded[: local.shape[0]] = local
        return all_gather(padded.reshape(-1), self.axis)[: shape.numel()].view(shape)

    def link(self) -> None:
        """Let the plain parameter have the DTensor's gradient; zeros where no rank used the parameter."""
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)
        self.local.grad = local_part(self.param.grad)


def find_shards(model: nn.Module, names: list[str], axis_of: Callable[[str], Axis]) -> dict[str, Shard]:
    """Shards by name, of those parameters that fully_shard took."""
    params = dict(model.named_parameters())
    found: dict[str, Shard] = {}
    for name in names:
        param = params[name]
        if isinstance(param, DTensor):
            local = nn.Parameter(local_part(param), requires_grad=param.requires_grad)
            found[name] = Shard(name, param, local, axis_of(name))
    return found


def whole_tensors(
    shards: Mapping[str, Shard],
    plain: Mapping[str, nn.Parameter],
    of: Callable[[nn.Parameter], torch.Tensor | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `of` gives of each parameter, by name and whole; what it gives None of is left out. A collective."""
    for name, shard in shards.items():
        if (local := of(shard.local)) is not None:
            yield name, shard.whole(local)
    for name, param in plain.items():
        if (tensor := of(param)) is not None:
            yield name, tensor


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's tensor on this rank; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
