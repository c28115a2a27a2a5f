"""Private names of torch that several packages or the mesh use, and typed versions of untyped torch functions.

Other private names are in the `private_torch.py` of the package that needs them. No other file of Weft uses private
names. `tests/repo/test_private_torch.py` checks this, and fails if a release of torch moves a name. Verified in torch
2.11 and torch 2.13 unless noted.
"""

# This file may use private names.
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
    TorchDispatchMode,  # base class of dispatch modes, documented only under this path
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import (  # torch has no public pytree API yet
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
    "backward_calls",
    "current_mode",
    "default_device_types",
    "default_timeout",
    "graph_task",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "groups_made",
    "hooks_of_parameter",
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
        """torch.autograd.Function whose `apply` has types: the arguments of `forward` after `ctx`, and its result."""

        apply: ClassVar[_Apply]  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares it with any types

else:
    Function = torch.autograd.Function


class _Split(Protocol):
    def __call__(self, tensor: torch.Tensor, sizes: int | list[int], dim: int = 0, /) -> tuple[torch.Tensor, ...]: ...


_untyped: Any = torch
#: `torch.split` with types. `sizes` has the sizes of all parts, or is the size of each part but the last.
split: _Split = _untyped.split


class _Wrapper(Protocol):
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


#: `torch.compiler.disable`, typed so that it preserves the decorated function's type.
uncompiled: _Wrapper = _untyped.compiler.disable

#: Operations on many tensors in one call. They are public, but type checkers report their names as private.
foreach_lerp_: Callable[[list[torch.Tensor], list[torch.Tensor], float], None] = _untyped._foreach_lerp_
foreach_mul_: Callable[[list[torch.Tensor], float | list[float] | torch.Tensor], None] = _untyped._foreach_mul_
foreach_norm: Callable[..., list[torch.Tensor]] = _untyped._foreach_norm

#: Returns the innermost active dispatch mode, or None.
current_mode = _get_current_dispatch_mode

#: Returns the id of the current backward pass, or -1 outside one. A forward that runs inside a backward pass is a
#: recomputation.
graph_task = torch._C._current_graph_task_id


@contextmanager
def without_modes() -> Generator[None]:
    """Disable dispatch modes inside the block, such as those that count operations.

    It is used for collectives in recomputed regions. Modes that emulate a device, such as torch's FakeTensorMode, stay
    active: fake tensors do not work without them.
    """
    disabled: Any = _disable_current_modes()  # pyright: ignore[reportUnknownVariableType] - untyped in torch
    with disabled as modes, ExitStack() as stays:
        for mode in reversed(modes):
            if _stands_for_device(mode):
                stays.enter_context(mode)
        yield


def is_watched() -> bool:
    """Return True if a dispatch mode is active that does not emulate a device, such as for selective recomputation."""
    mode = current_mode()
    return mode is not None and not _stands_for_device(mode)


def _stands_for_device(mode: Any) -> bool:
    """Return True if the mode only emulates a device: it executes operations and does not record or change them."""
    key = getattr(mode, "_mode_key", None)
    return mode.is_infra_mode() and key in (None, torch._C._TorchDispatchModeKey.FAKE)


@contextmanager
def backward_calls(record: Callable[[type], None]) -> Generator[None]:
    """Call `record` with the class of each custom autograd function whose backward runs inside the block."""
    node: Any = torch.autograd.function.BackwardCFunction
    original = {name: getattr(node, name) for name in ("apply", "apply_boxed") if hasattr(node, name)}

    def recording(call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(self: Any, *args: Any) -> Any:
            record(self._forward_cls)
            return call(self, *args)

        return recorded

    try:
        for name, call in original.items():
            setattr(node, name, recording(call))
        yield
    finally:
        for name, call in original.items():
            setattr(node, name, call)


def hooks_of_parameter(param: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the parameter's gradient hooks, and its hooks that run after the gradient is accumulated."""
    before: Any = param._backward_hooks
    after: Any = getattr(param, "_post_accumulate_grad_hooks", None)
    return [*(before or {}).values()], [*(after or {}).values()]


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return `model.named_modules()` with types."""
    untyped: Any = model
    return untyped.named_modules()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor (documented in torch's notes on autograd)."""
    return tensor._version


def viewed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view, as autograd records it, or None for a tensor that is not a view."""
    return tensor._base


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique among existing storages, also on the meta device, whose addresses are all 0."""
    return storage._cdata


def groups_made() -> Iterator[dist.ProcessGroup]:
    """Yield all process groups of this process. torch has no public list of them."""
    yield from dist.distributed_c10d._world.pg_map


@contextmanager
def naming_group(description: str) -> Generator[None]:
    """Use `description` as the name of process groups that only their members create inside the block.

    torch names a group by its ranks and by the number of groups that this rank has created. If only members create a
    group, that number differs between ranks, so they would use different names and wait forever. `new_group` has no
    name argument.

    If the default group is bound to a device, torch creates the NCCL communicator of a new group with ncclCommSplit, in
    which all ranks must take part, and the members would wait forever. The block unbinds the device, so the members
    create a communicator on first use.
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
    """Return the timeout of the default group's collectives, or None if its backend has no timeout.

    `new_group` does not use it as the default: groups created without a timeout use 30 minutes.
    """
    world = dist.distributed_c10d._get_default_group()
    backends = (world._get_backend(kind) for kind in world._device_types)
    limits = (getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends)
    return next((limit for limit in limits if limit is not None), None)


def default_device_types() -> set[str]:
    """Return the device types for which the default group has a backend. The set is empty without a default group."""
    return {kind.type for kind in dist.group.WORLD._device_types} if dist.group.WORLD is not None else set()
