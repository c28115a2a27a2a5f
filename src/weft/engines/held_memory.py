"""How many bytes of a rank's device hold what: weights, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.spec.figures import series


def memory_by_class(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor]
) -> dict[str, float]:
    """Return bytes by series: each storage counts once, for the first class that holds it.

    Args:
        model: parallelized; its parameters and buffers are weights.
        optimizer: its states, and the masters that it alone holds.
        gradients: the tensors that gradients lie in.
    """
    seen: set[int] = set()
    classes = {
        "weights": chain(model.parameters(), model.buffers()),
        "gradients": gradients,
        "optimizer": _of_optimizer(optimizer),
    }
    return {series("memory.bytes", name): float(_new_bytes(held, seen)) for name, held in classes.items()}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of storages that were not counted yet."""
    total = 0
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.device.type == "meta":
            continue
        storage = own.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
