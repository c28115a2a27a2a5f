"""A batch and its microbatches: cut here along dim 0, or handed over cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft.errors import ModelError
from weft.parallel.placement.batches import move_batch, parts_of, tensors_in, with_parts
from weft.spec.plan import Plan


class Microbatches:
    """A batch that is cut already: `step(Microbatches([first, second]))`, as many as the plan accumulates.

    A plain list is one batch, because that is what torch's DataLoader gives.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = tuple(batches)

    def to(self, device: torch.device) -> Microbatches:
        """The same on `device`."""
        return Microbatches(move_batch(batch, device) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def microbatches_of(batch: Any, plan: Plan) -> list[Any]:
    """What a step passes through the model one by one. Raises ModelError where that is not what the plan says."""
    expected = plan.microbatches_per_step
    if not isinstance(batch, Microbatches):
        return split_batch(batch, expected)
    if len(batch) != expected:
        field = "microbatches" if plan.pp > 1 else "accumulation"
        raise ModelError(f"{field}={expected}: this step was given {len(batch)}. Give as many as the plan says.")
    return list(batch)


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cut a batch into equal parts along dim 0 of its tensors; ModelError when that leaves a rest.

    A list without tensors that has an entry for each sample is cut too. Numbers, text and None go to every part.
    """
    if num_parts == 1:
        return [batch]
    return _split(batch, num_parts, samples_in(batch))


def samples_in(batch: Any) -> int:
    """Samples of a batch: dim 0 of its first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim), 1)


def values_in(batch: Any) -> int:
    """Values in the first tensor of a batch, about as many as it has tokens."""
    return next((tensor.numel() for tensor in tensors_in(batch) if tensor.ndim), 1)


def _split(batch: Any, num_parts: int, num_samples: int) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return _split_tensor(batch, num_parts)
    parts = parts_of(batch)
    if parts is None:
        if batch is None or isinstance(batch, bool | int | float | str | bytes):
            return [batch] * num_parts
        raise ModelError(
            f"accumulation={num_parts}: the batch holds a {type(batch).__name__}, which Weft cannot cut into "
            f"microbatches. Give it cut: step(weft.Microbatches([...])), or use accumulation=1."
        )
    if isinstance(batch, tuple | list) and len(batch) == num_samples and next(tensors_in(batch), None) is None:
        size = num_samples // num_parts
        return [batch[index * size : (index + 1) * size] for index in range(num_parts)]
    columns = [_split(part, num_parts, num_samples) for part in parts]
    return [with_parts(batch, [column[index] for column in columns]) for index in range(num_parts)]


def _split_tensor(tensor: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    if not tensor.ndim:
        return [tensor] * num_parts
    if tensor.shape[0] % num_parts:
        raise ModelError(
            f"accumulation={num_parts}: the batch has {tensor.shape[0]} samples on this rank, which is not a "
            f"multiple of {num_parts}. Use a batch that is, or another accumulation."
        )
    return list(tensor.chunk(num_parts))
