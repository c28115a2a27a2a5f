"""Forwards without side effects: buffers, attributes and generators are restored, users' hooks do not run."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.initialize import BATCH_NORMS

#: Containers whose contents are restored. For other attributes, only the reference is restored.
_CONTAINERS = (list, dict, set, deque)
#: Attributes that engines change while a forward runs.
_KEPT = frozenset({"_parameters", "_modules", "_buffers", "_non_persistent_buffers_set"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: Modules whose hooks are parts of the forward.
_OWNERS = ("torch.", "weft.")


@contextmanager
def traceless(model: nn.Module, *, runs_hooks: bool = False) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Restore the state of modules and generators afterwards; batch norms use their running statistics inside.

    Yields every buffer by name, with a copy of its values.
    """
    modules = list(model.modules())
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    registered = [(module, dict(vars(module)["_buffers"])) for module in modules]
    attributes = [(module, _attributes(module), set(vars(module))) for module in modules]
    hooks = [] if runs_hooks else [(module, _without_users_hooks(module)) for module in modules]
    norms = [module for module in modules if isinstance(module, BATCH_NORMS) and module.training]
    numpy: Any = sys.modules.get("numpy")
    generators = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = sorted({one.device.index for one in model.parameters() if one.device.type == "cuda"})
    try:
        for norm in norms:
            norm.training = False
        with torch.random.fork_rng(devices), torch.no_grad():
            yield buffers
    finally:
        for norm in norms:
            norm.training = True
        random.setstate(generators[0])
        if numpy is not None:
            numpy.random.set_state(generators[1])
        for module, removed in hooks:
            for name, kept in removed.items():
                vars(module)[name].clear()
                vars(module)[name].update(kept)
        for module, values, before in attributes:
            _restore(module, values, before)
        for module, known in registered:
            vars(module)["_buffers"].clear()
            vars(module)["_buffers"].update(known)
        with torch.no_grad():
            for buffer, values in buffers.values():
                buffer.copy_(values)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the module's attributes, with copies of containers."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(module).items():
        if name in _KEPT or name.startswith(("_weft", "_fsdp")) or "hooks" in name:
            continue
        if isinstance(value, list) and any(isinstance(one, nn.Parameter | weakref.ref) for one in value):
            continue  # of recurrent layers: they follow _parameters
        found[name] = value, value.copy() if type(value) in _CONTAINERS else None
    return found


def _restore(module: nn.Module, values: dict[str, tuple[Any, Any]], before: set[str]) -> None:
    own = vars(module)
    for name in set(own) - values.keys() - before:
        if name not in _KEPT and not name.startswith(("_weft", "_fsdp")) and "hooks" not in name:
            del own[name]
    for name, (value, contents) in values.items():
        own[name] = value
        if contents is not None:
            value.clear()
            value.extend(contents) if isinstance(value, list | deque) else value.update(contents)


def _without_users_hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Remove the hooks that are neither torch's nor Weft's. Returns all hooks."""
    found: dict[str, dict[int, Any]] = {}
    for name in _HOOKS:
        hooks = vars(module)[name]
        found[name] = dict(hooks)
        for key, hook in found[name].items():
            if not owner_of_hook(hook).startswith(_OWNERS):
                del hooks[key]
    return found


def owner_of_hook(hook: Any) -> str:
    """Return the module that defines a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__
