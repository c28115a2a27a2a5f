"""Host copies of device tensors that were moved from the host, and operations on nested batches.

With the host copy, indices can be checked and document boundaries found without a device synchronization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from weft.devices import access
from weft.private_torch import version_of, viewed

_ATTRIBUTE, _CHECKS = "_weft_host_values", "_weft_checks"


def remember_host(tensor: Tensor, values: Tensor) -> None:
    """Record that a device tensor has the values of the host tensor `values`, until either of them is written to.

    Does nothing if `tensor` is on the CPU, or is an inference tensor, which has no version counter.
    """
    if tensor.device.type != "cpu" and not tensor.is_inference():
        setattr(tensor, _ATTRIBUTE, (values, version_of(tensor), version_of(values)))


def host_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values on the host without a device synchronization, or None if no valid host copy is recorded.

    For a view of a moved tensor, such as a microbatch of a batch, the result is a view of the host copy. A CPU tensor
    is returned unchanged, but for a subclass of `torch.Tensor` the result is None.
    """
    if tensor.device.type == "cpu":
        return tensor if type(tensor) is Tensor else None
    whole = tensor if hasattr(tensor, _ATTRIBUTE) else viewed(tensor)
    held: Any = getattr(whole, _ATTRIBUTE, None)
    if whole is None or held is None:
        return None
    values, version, values_version = held
    if version_of(whole) != version or version_of(values) != values_version:
        return None
    if whole is tensor:
        return values
    if values.stride() != whole.stride() or tensor.dtype != whole.dtype:
        return None
    return _same_part(tensor, whole, values)


def _same_part(tensor: Tensor, whole: Tensor, values: Tensor) -> Tensor:
    """Return the view of `values` that corresponds to the view `tensor` of `whole`.

    `values` and `whole` have equal strides.
    """
    offset = values.storage_offset() + tensor.storage_offset() - whole.storage_offset()
    return values.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True, slots=True)
class _Check:
    part: Tensor
    look: Callable[[Tensor], None]


def mark_reused_buffer(tensor: Tensor) -> None:
    """Record that a tensor is a buffer into which successive batches are copied.

    A caller that checks the values of such a tensor registers the check with `leave_check` instead of running it.
    """
    setattr(tensor, _CHECKS, [])


def leave_check(tensor: Tensor, look: Callable[[Tensor], None]) -> bool:
    """Add a check that runs on every batch copied into a reused buffer, and return True.

    If the tensor is neither a reused buffer nor a view of one, do nothing and return False.

    Args:
        tensor: the buffer, or a view of it that the check reads.
        look: the check. It is called with the host values of `tensor`, if a host copy of the batch is recorded.
    """
    whole = tensor if hasattr(tensor, _CHECKS) else viewed(tensor)
    held: list[_Check] | None = getattr(whole, _CHECKS, None)
    if held is None:
        return False
    held.append(_Check(tensor, look))
    return True


def check_batch(holder: Tensor, given: Tensor) -> None:
    """Run the checks that `leave_check` registered for the reused buffer `holder` on the next batch `given`.

    Does nothing if no host copy of `given` is recorded.
    """
    checks: list[_Check] = getattr(holder, _CHECKS, [])
    values = host_values(given) if checks else None
    if values is None:
        return
    if values.stride() != holder.stride():
        values = torch.empty_like(values).copy_(values)  # same strides as `holder`
    for one in checks:
        one.look(_same_part(one.part, holder, values))


# Batch containers: tensors in tuples, lists, mappings and dataclasses, nested as collate functions produce them.


def parts_of(batch: Any) -> list[Any] | None:
    """Return the items of a container in order, or None if `batch` is not a container."""
    if isinstance(batch, (tuple, list)):
        return list(batch)
    if batch is None or isinstance(batch, (torch.Tensor, str, int, float)):
        return None  # the checks below cost more
    if isinstance(batch, Mapping):
        return list(batch.values())
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return None


def with_parts(batch: Any, parts: list[Any]) -> Any:
    """Return a copy of a container with its items replaced by `parts`.

    The copy has the same type, such as Hugging Face's BatchEncoding. Only an immutable mapping becomes a dict.
    """
    if type(batch) in (dict, tuple, list):
        return dict(zip(batch, parts, strict=True)) if isinstance(batch, dict) else type(batch)(parts)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        for name, part in zip(batch, parts, strict=True):
            changed[name] = part
        return changed
    if isinstance(batch, Mapping):
        return dict(zip(batch, parts, strict=True))
    if isinstance(batch, tuple | list):
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    changed = copy.copy(batch)
    for field, part in zip(fields(batch), parts, strict=True):
        object.__setattr__(changed, field.name, part)
    return changed


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over the tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    waiting = [batch]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif each is not None:
            waiting += reversed(parts_of(each) or ())
    return iter(found)


def versions_of(batch: Any) -> list[int]:
    """Return the version counters of a batch's tensors, which show writes by torch."""
    return [version_of(one) for one in tensors_in(batch) if not one.is_inference()]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Apply `change` to every tensor of a nested batch and return the result. Other values are returned unchanged."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    parts = parts_of(batch)
    return batch if parts is None else with_parts(batch, [map_tensors(change, part) for part in parts])


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move a batch to `device`. Copies from pinned memory to a GPU are asynchronous.

    Integer and bool tensors on the CPU are recorded as the host copies of the moved tensors, for `host_values`. An
    object other than a mapping that has a method `to` is moved by that method.
    """
    if isinstance(batch, torch.Tensor):
        if batch.device == device:
            return batch
        moved = batch.to(device, non_blocking=access.pins_memory(device) and batch.is_pinned())
        if type(batch) is torch.Tensor and batch.device.type == "cpu" and not batch.is_floating_point():
            remember_host(moved, batch)
        return moved
    if not isinstance(batch, Mapping) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    parts = parts_of(batch)
    return batch if parts is None else with_parts(batch, [move_batch(part, device) for part in parts])
