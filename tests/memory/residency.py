"""Simulation of host and device memory on one machine.

Host storages are those in the pool, and results computed only from them. An operation that mixes both memories raises,
as under CUDA, except for copies and scalars.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.memory.offload import HostPool

#: `_fused_adamw_` is allowed because torch's optimizers group tensors by device before they call it.
MIXING_ALLOWED = {"copy_", "_to_copy", "set_", "_fused_adamw_"}


class TwoMemories(TorchDispatchMode):
    """Raises on operations that mix host and device while active. pool: allocator of host buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._all: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.pool = HostPool(1 << 30, pin=self.to_host)

    def to_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = weakref.ref(storage)

    def is_host(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        found = self._host.get(storage._cdata)
        return found is not None and found() is storage

    def live_bytes(self, host: bool) -> int:
        """Return the bytes of live storages that were created while active, in one of the memories."""
        storages = [storage for ref in self._all.values() if (storage := ref()) is not None]
        return sum(one.nbytes() for one in storages if (one._cdata in self._host) == host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        sides = {self.is_host(tensor) for tensor in given if tensor.ndim}
        if name not in MIXING_ALLOWED and len(sides) > 1:
            raise RuntimeError(f"{name}: tensors of both memories")
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.is_meta:
                continue  # has no memory
            storage = tensor.untyped_storage()
            self._all[storage._cdata] = weakref.ref(storage)
            if sides == {True} and name not in ("_to_copy",):
                self.to_host(tensor)
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
