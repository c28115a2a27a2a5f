"""Forwards without side effects: buffers, attributes and generators are restored, and users' hooks do not run."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.random_state import seed_generators
from weft.devices import access
from weft.models.initialize import BATCH_NORMS

#: Containers whose contents are restored. Of other attributes, only the reference is restored.
_CONTAINERS = (list, dict, set, deque)
#: Types that are compared by value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Attributes that Weft changes while a forward runs.
_KEPT = frozenset({"_parameters", "_modules", "_buffers", "_non_persistent_buffers_set"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: Modules whose hooks belong to the forward.
_OWNERS = ("torch.", "weft.")


class ForwardState:
    """State of a model before a forward: attributes, buffers, random generators in attributes, and parameters.

    Buffers and tensors in attributes are copied. A parameter is copied by `before_write`, when forward writes to it.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        named = dict(model.named_modules())
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        self._registered = [(module, dict(vars(module)["_buffers"])) for module in named.values()]
        self._attributes = [(path, module, _attributes(module), set(vars(module))) for path, module in named.items()]
        values = [value for _, _, found, _ in self._attributes for value, _ in found.values()]
        self._generators = [value for value in values if isinstance(value, torch.Generator | random.Random)]
        self._drawn: list[tuple[Callable[[Any], Any], Any]] = [
            (one.set_state, one.get_state()) if isinstance(one, torch.Generator) else (one.setstate, one.getstate())
            for one in self._generators
        ]
        self._params = {name: (one, one.data) for name, one in model.named_parameters() if type(one.data) is Tensor}
        self._written: dict[str, Tensor] = {}

    @staticmethod
    def copied_bytes(model: nn.Module) -> int:
        """Return the bytes that the constructor copies."""
        own = (value for module in model.modules() for value, _ in _attributes(module, copies=False).values())
        return sum(one.nbytes for one in (*model.buffers(), *(value for value in own if type(value) is Tensor)))

    def seed(self, seed: int) -> None:
        """Seed the generators of torch, Python and numpy, and generators in attributes."""
        seed_generators(seed)
        for one in self._generators:
            one.manual_seed(seed) if isinstance(one, torch.Generator) else one.seed(seed)

    def before_write(self, tensor: Any) -> None:
        """Copy the parameters that overlap a tensor in memory, before a function writes to the tensor."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            return
        first, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        for name, (_, data) in self._params.items():
            if name in self._written or data.untyped_storage().data_ptr() != storage:
                continue
            if data.data_ptr() < first + max(tensor.nbytes, 1) and first < data.data_ptr() + data.nbytes:
                self._written[name] = data.clone()

    @torch.no_grad()
    def restore(self, *, attributes: bool = True) -> None:
        """Restore buffers, parameters and, unless `attributes` is False, attributes. Generators are not restored."""
        for module, known in self._registered:
            vars(module)["_buffers"].clear()
            vars(module)["_buffers"].update(known)
        for buffer, values in self._buffers.values():
            buffer.copy_(values)
        for name, (param, data) in self._params.items():
            if param.data_ptr() != data.data_ptr():
                param.data = data
            if name in self._written:
                data.copy_(self._written[name])
        if attributes:
            for _, module, values, before in self._attributes:
                _restore(module, values, before)

    def restore_generators(self) -> None:
        """Restore the generators in attributes."""
        for put, state in self._drawn:
            put(state)

    def changed_tensors(self) -> dict[str, Tensor]:
        """Return copies of the buffers and parameters that differ from this state."""
        now, found = dict(self._model.named_buffers()), dict[str, Tensor]()
        for name, (buffer, values) in self._buffers.items():
            moved = now.get(name, buffer)
            if moved.shape == values.shape and not _is_equal(moved, values):
                found[name] = moved.clone()
        for name, (param, data) in self._params.items():
            moved = param.data_ptr() != data.data_ptr() or name in self._written
            if moved and not _is_equal(param.data, self._written.get(name, data)):
                found[name] = param.data.clone()
        return found

    def is_param(self, name: str) -> bool:
        """Return True for the name of a parameter."""
        return name in self._params

    def values_of(self, name: str) -> Tensor:
        """Return the saved values of a buffer or a parameter."""
        return self._buffers[name][1] if name in self._buffers else self._written.get(name, self._params[name][1])

    def attributes(self) -> dict[str, tuple[Any, Any]]:
        """Return the current attributes by name, with copies of tensors and containers."""
        return {
            f"{path}.{name}".lstrip("."): value
            for path, module, _, _ in self._attributes
            for name, value in _attributes(module).items()
        }


def changed_attributes(before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return the attributes of `after` whose value or contents differ from `before`."""
    missing = object(), None
    return {name: found[0] if found[1] is None else found[1] for name, found in after.items()
            if not _is_same(before.get(name, missing), found)}  # fmt: skip


def _is_same(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    (was, held), (now, holds) = before, after
    if type(was) is not type(now):
        return False
    if type(now) is Tensor:
        return _is_equal(held, holds)
    if was is not now:
        return _is_same_item(was, now)
    if held is None or isinstance(held, set):
        return held == holds
    one, other = (list(each.items()) if isinstance(each, dict) else list(each) for each in (held, holds))
    return len(one) == len(other) and all(map(_is_same_item, one, other))


def _is_same_item(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_is_same_item, one, other))
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and (one == other or one != one))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@contextmanager
def traceless(model: nn.Module, *, runs_hooks: bool = False) -> Iterator[ForwardState]:
    """Run forwards without side effects inside this context: the state of modules and generators is restored on exit.

    Yields the state. Batch norms use running statistics, gradients are off, and users' hooks run only if `runs_hooks`.
    """
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS) and module.training]
    for norm in norms:
        norm.training = False
    state = ForwardState(model)
    hooks = [] if runs_hooks else [(module, _without_users_hooks(module)) for module in model.modules()]
    numpy: Any = sys.modules.get("numpy")
    generators = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = {one.device for one in model.parameters()}
    try:
        with access.forked_generators(*devices), torch.no_grad():
            yield state
    finally:
        random.setstate(generators[0])
        if numpy is not None:
            numpy.random.set_state(generators[1])
        for module, removed in hooks:
            for name, kept in removed.items():
                vars(module)[name].clear()
                vars(module)[name].update(kept)
        state.restore()
        state.restore_generators()
        for norm in norms:
            norm.training = True


def _attributes(module: nn.Module, *, copies: bool = True) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(module).items():
        if name in _KEPT or name.startswith(("_weft", "_fsdp")) or "hooks" in name:
            continue
        if isinstance(value, list) and any(isinstance(one, nn.Parameter | weakref.ref) for one in value):
            continue  # of recurrent layers: they follow _parameters
        contents = None
        if copies and type(value) is Tensor:
            contents = value.detach().clone()
        elif copies and type(value) in _CONTAINERS:
            contents = value.copy()
        found[name] = value, contents
    return found


def _restore(module: nn.Module, values: dict[str, tuple[Any, Any]], before: set[str]) -> None:
    own = vars(module)
    for name in set(own) - values.keys() - before:
        if name not in _KEPT and not name.startswith(("_weft", "_fsdp")) and "hooks" not in name:
            del own[name]
    for name, (value, contents) in values.items():
        own[name] = value
        if isinstance(contents, Tensor):
            if not _is_equal(value, contents):
                value.copy_(contents)
        elif contents is not None:
            value.clear()
            value.extend(contents) if isinstance(value, list | deque) else value.update(contents)


def _without_users_hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Remove the hooks that are neither torch's nor Weft's, and return all original hooks."""
    found: dict[str, dict[int, Any]] = {}
    for name in _HOOKS:
        hooks = vars(module)[name]
        found[name] = dict(hooks)
        for key, hook in found[name].items():
            if not owner_of_hook(hook).startswith(_OWNERS):
                del hooks[key]
    return found


def owner_of_hook(hook: Any) -> str:
    """Return the name of the Python module that defines a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__
