"""Private names of torch that memory/ uses, each with its purpose. Checked in torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch.utils import checkpoint
from torch.utils.checkpoint import _VersionWrapper

from weft.private_torch import tree_leaves

__all__ = [
    "GROUPED_MM",
    "StoredValue",
    "above_autograd",
    "compiled_call",
    "record_memory",
    "recompute_marker",
    "set_compiled_call",
    "write_memory",
    "written_arguments",
]

#: The CUDA allocator's history, and its snapshot as a file for https://pytorch.org/memory_viz.
_record_history, write_memory = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot


def record_memory(on: bool) -> None:
    """Begin or end recording the history of the CUDA allocator."""
    _record_history(max_entries=100_000) if on else _record_history(enabled=None)


#: Grouped matmul of all experts, for which torch counts no FLOPs. `F.grouped_mm` calls it.
GROUPED_MM = torch.ops.aten._grouped_mm

#: Entry of an operation's output in a selective checkpoint: `val`, and `version` when it was stored. Needed because
#: stored values must be saved tensors that offload hooks receive, and torch has no hook for that.
StoredValue = _VersionWrapper


def recompute_marker() -> Any:
    """Return the marker that makes a selective checkpoint of torch >= 2.12 recompute a value."""
    return checkpoint._RECOMPUTE  # pyright: ignore[reportAttributeAccessIssue] - torch 2.11 lacks it


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensor arguments that an operation modifies, according to its schema; none without a schema."""
    schema: Any = getattr(op, "_schema", None)
    if not getattr(schema, "is_mutable", False):
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that `module.compile()` set to replace the module's hooks and forward, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make a compiled module call `call`, a wrapper of its compiled call. Hooks would be compiled with it."""
    module._compiled_call_impl = call  # pyright: ignore[reportAttributeAccessIssue] - torch says None


@contextmanager
def above_autograd() -> Generator[None]:
    """Enable autograd inside this context: torch runs a custom operator's code with autograd disabled."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
