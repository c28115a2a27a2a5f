"""State that a block changes in its forward: counters, caches, lists. Recomputation must not advance it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from weft.errors import ModelError
from weft.private_torch import version_of

#: Number of calls to a block after which attributes are no longer checked for changes.
_WATCHED_CALLS = 3


class BlockState:
    """Attributes of a block and its modules before a forward: counters, caches, lists. Tensors are stored by reference.

    Recomputation starts from them. Afterwards the attributes from before the recomputation are restored, so state that
    forward changes advances only once.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._before = _attributes(block)
        self._versions = {name: version_of(buffer) for name, buffer in block.named_buffers()}

    @classmethod
    def of(cls, block: nn.Module) -> BlockState | None:
        """Return the state of a block whose forward may change its attributes, else None."""
        calls = getattr(block, "_weft_watched_calls", 0)
        return cls(block) if calls < _WATCHED_CALLS or getattr(block, "_weft_keeps_state", False) else None

    def compare(self, buffers: Sequence[str]) -> None:
        """Count a call to the block, and record whether its forward changed attributes.

        Args:
            buffers: names of buffers that may change.

        Raises:
            ModelError: if another buffer changed, because its value before the forward is lost.
        """
        block = self._block
        block._weft_watched_calls = getattr(block, "_weft_watched_calls", 0) + 1  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue] - a number of Weft's
        if not _is_same(self._before, _attributes(block)):
            block._weft_keeps_state = True  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue] - a flag of Weft's
        for name, buffer in block.named_buffers():
            if name not in buffers and name in self._versions and version_of(buffer) != self._versions[name]:
                raise ModelError(
                    f"recompute: buffer {name!r} of a {type(block).__name__} changes in some forwards only, so a "
                    f"replay cannot begin with its earlier value. Change it in every forward, or use recompute=none."
                )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set the recorded attributes inside the context, if forwards change any, and the current ones on exit."""
        if not getattr(self._block, "_weft_keeps_state", False):
            yield
            return
        now = _attributes(self._block)
        _set_attributes(self._before)
        try:
            yield
        finally:
            _set_attributes(now)


#: Per module: its attributes, and the contents of its lists, dicts and sets.
_Attributes = list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]]


def _attributes(block: nn.Module) -> _Attributes:
    found: _Attributes = []
    for module in block.modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_weft")}
        contents = [
            (value, value.copy())
            for name, value in own.items()
            if isinstance(value, list | dict | set) and name not in _OF_TORCH
        ]
        found.append((module, own, contents))
    return found


#: Attributes of every module that are handled elsewhere: parameters, buffers and hooks.
_OF_TORCH = frozenset(vars(nn.Module()))


def _is_same(before: _Attributes, after: _Attributes) -> bool:
    """Return True if all attributes are the same objects with the same contents."""
    for (_, was, held), (_, now, holds) in zip(before, after, strict=True):
        if was.keys() != now.keys() or any(was[name] is not now[name] for name in was):
            return False
        if any(not _is_same_content(old, new) for (_, old), (_, new) in zip(held, holds, strict=True)):
            return False
    return True


def _is_same_content(old: Any, new: Any) -> bool:
    pairs = (old.items(), new.items()) if isinstance(old, dict) else (old, new)
    return len(old) == len(new) and all(
        one is other or (isinstance(one, tuple) and one[0] == other[0] and one[1] is other[1])
        for one, other in zip(*pairs, strict=True)
    )


def _set_attributes(attributes: _Attributes) -> None:
    for module, own, contents in attributes:
        kept = {name: value for name, value in vars(module).items() if name.startswith("_weft")}
        module.__dict__.clear()
        module.__dict__.update({**own, **kept})
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


@contextlib.contextmanager
def spare_attributes(block: nn.Module) -> Iterator[None]:
    """Restore the attributes of a block and its modules on exit, with the contents of lists, dicts and sets."""
    before = _attributes(block)
    try:
        yield
    finally:
        _set_attributes(before)
