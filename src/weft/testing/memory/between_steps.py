"""What is in memory between two steps: bytes of parameters, gradients and optimizer states on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class BytesBetweenSteps:
    """params: what the module holds. grads: whole or sharded. optimizer: its states, and masters where there are."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> BytesBetweenSteps:
    """Count the memory behind a parallelized model and its adopted optimizer, each allocation once."""
    pieces = [param for group in optimizer.param_groups for param in group["params"]]
    seen: set[int] = set()
    params = _count(model.parameters(), seen)
    grads = _count((tensor.grad for tensor in [*model.parameters(), *pieces] if tensor.grad is not None), seen)
    states = (value for state in optimizer.state.values() for value in state.values())
    return BytesBetweenSteps(params, grads, _count([*pieces, *states], seen))


def _count(tensors: Iterable[object], seen: set[int]) -> int:
    """Bytes of the allocations behind tensors, without those seen before."""
    total = 0
    for tensor in plain_tensors(tensors):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def plain_tensors(tensors: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among some objects, of DTensors this rank's part."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            yield tensor.to_local()
        elif isinstance(tensor, torch.Tensor):
            yield tensor
