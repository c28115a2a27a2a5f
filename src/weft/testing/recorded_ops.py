"""A stand-in for CUDA graphs on a CPU: operators as they were called, on the tensors that they were called with.

A replay calls the same operators with the same numbers and tensors, and copies what is new into the memory where it was
at first. No code of the model, of autograd or of Weft runs in it, so what a recording freezes by mistake stays frozen
here as it would on a GPU. What a GPU forbids while it records is an error here too, as far as a CPU can tell: reading a
value, sizes that follow from values, and tensors that are made of numbers of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.memory.replay import Recording, cannot_record
from weft.private_torch import TorchDispatchMode, tree_leaves, tree_map_only
from weft.testing.private_torch import changes_arguments, name_of

T = TypeVar("T")

#: Operators for which the host waits, by why.
_WAITS = {
    "aten::_local_scalar_dense": "the host reads a value",
    "aten::equal": "the host reads a value",
    "aten::is_nonzero": "the host reads a value",
    "aten::nonzero": "a size follows from values",
    "aten::masked_select": "a size follows from values",
    "aten::unique_dim": "a size follows from values",
    "aten::_unique2": "a size follows from values",
    "aten::bincount": "a size follows from values",
    "aten::lift_fresh": "numbers of the host are sent",
}


class OpRecorder:
    """Records operators; see `weft.memory.replay.Recorder`.

    num_ops: operators in each recording, in their order. num_replays: of all, without the first run of each.
    """

    def __init__(self) -> None:
        self.num_ops: list[int] = []
        self.num_replays = 0

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Run a function and record its operators.

        Args:
            act: gives them.
            what: it is, for errors.
            apart: whether others' replays must leave its results alone; they always do.
        """
        del apart  # all memory is kept
        mode, before = _Ops(), torch.get_rng_state()
        try:
            with mode:
                result = act()
        except _HostWaits as error:
            raise cannot_record(what, error) from error
        self.num_ops.append(len(mode.calls))

        def replay() -> None:
            self.num_replays += 1
            mode.replay()

        return Recording(result, replay, not torch.equal(before, torch.get_rng_state()))


class _HostWaits(RuntimeError):
    """What is recorded needs the host."""


class _Ops(TorchDispatchMode):
    """It carries operators out and observes nobody, so where Weft shuts out modes that watch, it stays."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        #: Operator, arguments, and results that are new memory.
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _WAITS or _indexes_by_mask(name, args):
            raise _HostWaits(f"{name}: {_WAITS.get(name, 'a size follows from values')}")
        given = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, Tensor)}
        new = [one.detach() for one in tree_leaves(out) if isinstance(one, Tensor)]
        new = [one for one in new if one.untyped_storage().data_ptr() not in known or not one.numel()]
        if new or changes_arguments(func):
            self.calls.append((func, *given, new))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Call them again."""
        for func, args, kwargs, new in self.calls:
            found = func(*args, **kwargs)
            if new:
                fresh = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
                for mine, other in zip(new, fresh, strict=True):
                    mine.copy_(other)


def _indexes_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    if not name.startswith("aten::index") or len(args) < 2 or not isinstance(args[1], list | tuple):
        return False
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
