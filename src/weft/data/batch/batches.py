"""What a batch is made of: tensors in tuples, lists, mappings and dataclasses, nested as collate functions like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from weft.data.batch.on_host import remember_host


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
