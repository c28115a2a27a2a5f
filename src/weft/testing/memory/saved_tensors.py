"""Bytes that autograd keeps for backward; of compiled code too, whose operations nothing else sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import saved_tensors_hooks

from weft.private_torch import storage_key


def saved_bytes(forward: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """Return the bytes of storages that autograd keeps of one forward.

    Args:
        forward: run here.
        known: tensors that are not counted, such as parameters.
    """
    ignored = {storage_key(tensor.untyped_storage()) for tensor in known}
    found: dict[int, torch.UntypedStorage] = {}  # held, so that none is freed and its place taken

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (key := storage_key(storage)) not in ignored:
            found[key] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in found.values())
