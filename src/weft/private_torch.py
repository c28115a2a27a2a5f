"""Private names of torch that more than one floor uses, and those of the mesh.

A floor that needs a private name alone keeps it in its own file of this name; no other file of Weft touches one.
`tests/house/test_private_torch.py` checks that, and names what a release of torch has moved. Read in torch 2.11 and
2.13, where not said otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # the class for modes that see operations; documented under this path, and under no other
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import (  # torch has no public trees of values yet
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TorchDispatchMode",
    "current_mode",
    "default_device_types",
    "graph_task",
    "groups_made",
    "naming_group",
    "register_pytree_node",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "without_modes",
]

#: A context in which no mode sees operations: collectives inside of a recomputed region, which counts them.
without_modes = _disable_current_modes
#: The innermost mode that sees operations; None where there is none.
current_mode = _get_current_dispatch_mode

#: Number of the backward pass under way; -1 outside of one. Tells a recomputed forward from a first one.
graph_task = torch._C._current_graph_task_id


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place. Documented in torch's notes on autograd, by this name."""
    return tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a living storage from others, on the meta device too, where all addresses are 0."""
    return storage._cdata


def groups_made() -> Iterator[dist.ProcessGroup]:
    """All process groups of this process. torch gives no list of them."""
    yield from dist.distributed_c10d._world.pg_map


@contextmanager
def naming_group(description: str) -> Iterator[None]:
    """While inside, a group that only its members make is named by its description alone.

    torch names it by its ranks and by how many groups this rank has made, which is not the same on all ranks where only
    members make a group: they would wait for each other under different names. `new_group` takes no name.
    """
    names = dist.distributed_c10d
    by_count = names._hash_ranks_to_str
    names._hash_ranks_to_str = lambda ranks: hashlib.sha1(description.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        names._hash_ranks_to_str = by_count


def default_device_types() -> set[str]:
    """The kinds of devices for which the default group has a backend; empty before there is one."""
    return {kind.type for kind in dist.group.WORLD._device_types} if dist.group.WORLD is not None else set()
