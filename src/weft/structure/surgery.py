"""The class of a module, replaced from outside: paths, parameters, state_dict names and other methods stay.

All modules of one class that become one kind share one new class. torch.compile guards on classes and gives up after
eight, so a class for each block would leave deep models without compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

#: What a new class has of its own, made from the class that it stands on.
Body = Callable[[type], dict[str, Any]]


def become(module: nn.Module, kind: type, body: Body | None = None, **state: Any) -> None:
    """Give the module the behaviour of `kind`, on top of its own class, in place.

    Args:
        module: its class is replaced.
        kind: a base for the new class, in front of the module's own. It keeps its subclasses alive no longer than their
            modules.
        body: members of the new class beside those of `kind`; the same for every call with this kind and class.
        **state: set on the module, each name after `_weft_`.
    """
    module.__class__ = _known(kind, type(module)) or _made(kind, type(module), body)
    for name, value in state.items():
        setattr(module, f"_weft_{name}", value)


def revert(module: nn.Module, kind: type) -> None:
    """Give the module the class that it had before it became `kind`, where that was the last that it became."""
    bases = type(module).__bases__
    if len(bases) == 2 and bases[0] is kind:
        module.__class__ = bases[1]


def class_before(module: nn.Module) -> type:
    """Return the class that a module came with, whatever it became."""
    now = type(module)
    named = (now.__module__, now.__qualname__)
    return [kind for kind in now.__mro__ if (kind.__module__, kind.__qualname__) == named][-1]


def _known(kind: type, own: type) -> type | None:
    # type's own list of subclasses is the cache: it holds them weakly, so a model's classes go when the model goes.
    return next((one for one in kind.__subclasses__() if one.__bases__ == (kind, own)), None)


def _made(kind: type, own: type, body: Body | None) -> type:
    members = body(own) if body is not None else {}
    # Who asks the class for its name is told the module's own: a layer that is cut is still that layer.
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__qualname__": own.__qualname__, **members})
