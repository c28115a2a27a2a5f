"""Private names of torch that more than one floor uses, and those of the mesh; and types that torch leaves out.

A floor that needs a private name alone keeps it in its own file of this name; no other file of Weft touches one.
`tests/repo/test_private_torch.py` checks that, and names what a release of torch has moved. Read in torch 2.11 and
2.13, where not said otherwise.
"""

# This file is where private names are used.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
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
    "Function",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "current_mode",
    "default_device_types",
    "default_timeout",
    "graph_task",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "groups_made",
    "is_watched",
    "named_modules",
    "naming_group",
    "register_pytree_node",
    "split",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "uncompiled",
    "version_of",
    "viewed",
    "without_modes",
]

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class _HasForward(Protocol[P, R]):
        @staticmethod
        def forward(ctx: Any, *args: P.args, **kwargs: P.kwargs) -> R: ...

    class _Apply:
        def __get__(self, instance: None, owner: type[_HasForward[P, R]]) -> Callable[P, R]: ...

    class Function(torch.autograd.Function):
        """A step of autograd whose `apply` takes what its `forward` takes after `ctx`, and gives the same."""

        apply: ClassVar[_Apply]  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's takes and gives anything

else:
    Function = torch.autograd.Function


class _Split(Protocol):
    def __call__(self, tensor: torch.Tensor, sizes: int | list[int], dim: int = 0, /) -> tuple[torch.Tensor, ...]: ...


_untyped: Any = torch
#: `torch.split`, which has no types. sizes: of each part, or of all but the last.
split: _Split = _untyped.split


class _Wrapper(Protocol):
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


#: `torch.compiler.disable`, whose types lose those of the function.
uncompiled: _Wrapper = _untyped.compiler.disable

#: Many tensors in one call. torch's documentation lists these functions, under names that type checkers call private.
foreach_lerp_: Callable[[list[torch.Tensor], list[torch.Tensor], float], None] = _untyped._foreach_lerp_
foreach_mul_: Callable[[list[torch.Tensor], float | list[float] | torch.Tensor], None] = _untyped._foreach_mul_
foreach_norm: Callable[..., list[torch.Tensor]] = _untyped._foreach_norm

#: The innermost mode that sees operations; None where there is none.
current_mode = _get_current_dispatch_mode

#: Number of the backward pass under way; -1 outside of one. Tells a recomputed forward from a first one.
graph_task = torch._C._current_graph_task_id


@contextmanager
def without_modes() -> Generator[None]:
    """While inside, no mode sees operations: of collectives in a recomputed region, which counts them.

    A mode that stands for a device stays, as torch's FakeTensorMode: tensors without values cannot do without it.
    """
    disabled: Any = _disable_current_modes()  # pyright: ignore[reportUnknownVariableType] - torch leaves it untyped
    with disabled as modes, ExitStack() as stays:
        for mode in reversed(modes):
            if _stands_for_device(mode):
                stays.enter_context(mode)
        yield


def is_watched() -> bool:
    """Whether a mode sees operations that does not stand for a device, such as selective recompute's."""
    mode = current_mode()
    return mode is not None and not _stands_for_device(mode)


def _stands_for_device(mode: Any) -> bool:
    """Whether the mode carries operations out, and neither watches nor rewrites them."""
    key = getattr(mode, "_mode_key", None)
    return mode.is_infra_mode() and key in (None, torch._C._TorchDispatchModeKey.FAKE)


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """`model.named_modules()`, which has no types."""
    untyped: Any = model
    return untyped.named_modules()


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place. Documented in torch's notes on autograd, by this name."""
    return tensor._version


def viewed(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that another is a view of, as autograd knows it; None where it is none."""
    return tensor._base


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a living storage from others, on the meta device too, where all addresses are 0."""
    return storage._cdata


def groups_made() -> Iterator[dist.ProcessGroup]:
    """All process groups of this process. torch gives no list of them."""
    yield from dist.distributed_c10d._world.pg_map


@contextmanager
def naming_group(description: str) -> Generator[None]:
    """While inside, a group that only its members make is named by its description alone, and made by them alone.

    torch names it by its ranks and by how many groups this rank has made, which is not the same on all ranks where only
    members make a group: they would wait for each other under different names. `new_group` takes no name.
    Where the default group is bound to a device, torch splits NCCL's communicator of a new group from that of all
    ranks, and each of those must take part in ncclCommSplit: the members would wait for ever. Without a device the
    members make a communicator of their own when they first use it.
    """
    names = dist.distributed_c10d
    default = names._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    by_count = names._hash_ranks_to_str
    names._hash_ranks_to_str = lambda ranks: hashlib.sha1(description.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        names._hash_ranks_to_str = by_count
        default.bound_device_id = device


def default_timeout() -> timedelta | None:
    """How long collectives of the default group wait; None where its backend has no such limit.

    `new_group` does not ask it: groups made without a timeout wait for 30 minutes.
    """
    world = dist.distributed_c10d._get_default_group()
    backends = (world._get_backend(kind) for kind in world._device_types)
    limits = (getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends)
    return next((limit for limit in limits if limit is not None), None)


def default_device_types() -> set[str]:
    """The kinds of devices for which the default group has a backend; empty before there is one."""
    return {kind.type for kind in dist.group.WORLD._device_types} if dist.group.WORLD is not None else set()
