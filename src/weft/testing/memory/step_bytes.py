"""The most bytes of live tensors in one training step: what it begins with, and what it makes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.private_torch import storage_key, tree_leaves
from weft.testing.memory.live_tensors import LiveTensors
from weft.testing.private_torch import storage_behind
from weft.train import TrainStep


class StepBytes(LiveTensors):
    """Counts what a step begins with too, as long as it lives, and what is read that was made out of sight.

    Storages count with the size that they have: those of gathered parameters are emptied, and live on.
    """

    def __init__(self, begins_with: Iterable[torch.Tensor], outside: Iterable[torch.Tensor]):
        super().__init__(outside)
        for tensor in begins_with:
            self._note(tensor)

    @property
    def now(self) -> int:
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        alive = (storage_behind(ref.cdata) for ref, _ in self._made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._known:
            self._made.setdefault(storage_key(storage), (StorageWeakRef(storage), storage.nbytes()))


def peak_of_step(step: TrainStep, batch: Any) -> int:
    """Return the bytes on this rank at the fullest moment of a step, the batch not counted. Trains one step.

    Args:
        step: of the model.
        batch: what it is given: a dict, or microbatches.
    """
    gc.collect()
    parts = [batch] if isinstance(batch, dict) else list(batch)
    given = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
    watch = StepBytes(_states(step), given)
    with watch:
        step(batch)
    return watch.peak


def _states(step: TrainStep) -> Iterator[torch.Tensor]:
    """Weights, gradients and optimizer states. Nobody keeps what this gives."""
    pieces = [param for group in step.optimizer.param_groups for param in group["params"]]
    for param in (*step.model.parameters(), *pieces):
        yield param.detach()
        if param.grad is not None:
            yield param.grad.detach()
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    yield from step.held_gradients()
