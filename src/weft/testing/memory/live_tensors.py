"""Bytes of tensors that are alive, exactly: what a step really keeps, on any device, without a GPU's allocator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weft.private_torch import TorchDispatchMode, storage_key, tree_leaves


class LiveTensors(TorchDispatchMode):
    """While active, follows every storage that an operation makes.

    now: bytes of those that are alive, whoever holds them (autograd's graph too). peak: the most there were after
    any operation. Storages of `known` tensors, such as parameters, are not counted. Compiled code is not seen.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.peak = 0
        self._known = {storage_key(tensor.untyped_storage()) for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """The bytes of the storages that are alive."""
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage_key(storage) not in self._known:
                    self._made[storage_key(storage)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return outputs
