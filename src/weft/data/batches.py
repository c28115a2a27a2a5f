"""What tensors of a device hold, where the host knows it: those that it moved there, and parts of them.

So indices can be checked, and borders of documents found, without a wait for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from weft.private_torch import version_of, viewed

_ATTRIBUTE, _CHECKS = "_weft_host_values", "_weft_checks"


def remember_host(tensor: Tensor, values: Tensor) -> None:
    """Say that a tensor of a device holds what `values` on the host does, as long as neither is written to."""
    if tensor.device.type != "cpu" and not tensor.is_inference():
        setattr(tensor, _ATTRIBUTE, (values, version_of(tensor), version_of(values)))


def host_values(tensor: Tensor) -> Tensor | None:
    """Return the same values on the host, without asking the device; None where nobody knows them.

    Of a view of a tensor that was moved, such as a microbatch of a batch, they are a view too.
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
    """What of `values` lies where a view lies in a whole of the same strides."""
    offset = values.storage_offset() + tensor.storage_offset() - whole.storage_offset()
    return values.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True, slots=True)
class _Check:
    """Something that looks at the host's values of a part of a tensor."""

    part: Tensor
    look: Callable[[Tensor], None]


def mark_reused_buffer(tensor: Tensor) -> None:
    """Say that batches come and go in this tensor: whoever would look at its values leaves a check instead."""
    setattr(tensor, _CHECKS, [])


def leave_check(tensor: Tensor, look: Callable[[Tensor], None]) -> bool:
    """Let every batch be looked at that comes into a tensor, or a view of one; False where none come and go in it.

    Args:
        tensor: that would be looked at now.
        look: is given the values on the host, where it knows them.
    """
    whole = tensor if hasattr(tensor, _CHECKS) else viewed(tensor)
    held: list[_Check] | None = getattr(whole, _CHECKS, None)
    if held is None:
        return False
    held.append(_Check(tensor, look))
    return True


def check_batch(holder: Tensor, given: Tensor) -> None:
    """Look at what comes into a tensor, as its checks do. given: of the same shape."""
    checks: list[_Check] = getattr(holder, _CHECKS, [])
    values = host_values(given) if checks else None
    if values is None:
        return
    if values.stride() != holder.stride():
        values = torch.empty_like(values).copy_(values)  # strides as the holder was given them
    for one in checks:
        one.look(_same_part(one.part, holder, values))


# What a batch is made of: tensors in tuples, lists, mappings and dataclasses, nested as collate functions like.


def parts_of(batch: Any) -> list[Any] | None:
    """Return what a container holds, in its order; None for anything that is no container."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return None


def with_parts(batch: Any, parts: list[Any]) -> Any:
    """Return a container of the same type, such as Hugging Face's BatchEncoding, with other parts in its places."""
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
    """Yield the tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    for part in parts_of(batch) or ():
        yield from tensors_in(part)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Change every tensor of a batch; what is neither tensor nor container stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    parts = parts_of(batch)
    return batch if parts is None else with_parts(batch, [map_tensors(change, part) for part in parts])


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move a batch to `device`; pinned tensors travel without the host waiting.

    Of whole numbers that come from the host, `host_values` knows what they are afterwards.
    """
    if isinstance(batch, torch.Tensor):
        if batch.device == device:
            return batch
        moved = batch.to(device, non_blocking=device.type == "cuda" and batch.is_pinned())
        if type(batch) is torch.Tensor and batch.device.type == "cpu" and not batch.is_floating_point():
            remember_host(moved, batch)
        return moved
    if not isinstance(batch, Mapping) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    parts = parts_of(batch)
    return batch if parts is None else with_parts(batch, [move_batch(part, device) for part in parts])
