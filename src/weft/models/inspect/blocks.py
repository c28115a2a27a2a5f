"""A model's repeated blocks: what is recomputed, compiled, gathered and counted one at a time.

`outermost` is the one walk that looks for them. Callers differ in what they ask of a module: recompute and compile
want blocks (`repeated_blocks`), ZeRO 3 also wants large layers outside of them, and `describe` wants what is alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.models.inspect.private_torch import children

LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (nn.Sequential, *LISTS)
_NUMBERED = re.compile(r"(.*?)\d+")


@dataclass(frozen=True, slots=True)
class Site:
    """A module's place in the model: the module that holds it, and its name there."""

    parent: nn.Module
    key: str
    path: str

    @property
    def module(self) -> nn.Module:
        """What is there now."""
        found = children(self.parent)[self.key]
        assert found is not None
        return found


def outermost(model: nn.Module, is_wanted: Callable[[Site], bool]) -> list[Site]:
    """Return the sites below `model` that are wanted, in the order of the modules.

    A module inside a wanted one is left out, and so is one without parameters. A module with several sites has the
    first that is wanted.
    """
    found: dict[nn.Module, Site] = {}
    opened: set[nn.Module] = set()

    def look_into(parent: nn.Module, path: str) -> None:
        opened.add(parent)
        for name, module in parent.named_children():
            site = Site(parent, name, join_path(path, name))
            if module in found or not has_params(module):
                continue
            if is_wanted(site):
                found[module] = site
            elif module not in opened:
                look_into(module, site.path)

    look_into(model, "")
    inside = {part for module in found for part in module.modules() if part is not module}
    return [site for module, site in found.items() if module not in inside]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by module path, in the order of registration; empty if there are none.

    A block is a module that is called. The blocks are the outermost ones of these:

    - entries of ModuleLists, and of ModuleDicts with numbers as keys or with two entries of one class;
    - composite children of Sequentials (a residual network's stages are made so);
    - composite modules of one class with numbered names (`layer0`, `layer1`) or, without other blocks, any names.

    Lists inside of a list, and modules without a forward, are never called: their entries are the blocks. A block
    never lies inside another, and a block that is listed under several paths has the first.
    """
    return {site.path: site.module for site in block_sites(model)}


def block_sites(model: nn.Module) -> list[Site]:
    """Return the sites of `repeated_blocks`."""
    lists = _open_lists(model)
    listed = outermost(model, lambda site: site.parent in lists and not is_never_called(site.module))
    found = listed
    for is_wanted in (_is_in_sequential, _is_numbered):
        around = outermost(model, is_wanted)
        # One module around all blocks, such as an encoder between two layers, is not repeated.
        if _inside(found, around) and (len(around) > 1 or (around and not found)):
            found = around
    return found or outermost(model, _is_sibling)


def _inside(sites: Sequence[Site], around: Sequence[Site]) -> bool:
    """Return whether each of the sites lies in one of the others. True without sites."""
    return all(any(site.path.startswith(f"{outer.path}.") for outer in around) for site in sites)


def _open_lists(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose entries are blocks: lists, and what is never called inside of them."""
    found: set[nn.Module] = set()

    def open_all(module: nn.Module) -> None:
        found.add(module)
        for child in module.children():
            if is_never_called(child):
                open_all(child)

    for module in model.modules():
        if isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and _is_repeated(module)):
            open_all(module)
    return found


def _is_repeated(entries: nn.ModuleDict) -> bool:
    """Return whether a ModuleDict holds blocks, and not parts of different kinds by name."""
    kinds = Counter(type(child) for child in map(original, entries.children()) if _is_composite(child))
    numbers = [key for key in entries if key.isdecimal()]
    return len(numbers) == len(entries) > 0 or max(kinds.values(), default=0) > 1


def is_never_called(module: nn.Module) -> bool:
    """Return whether a module has no forward: ModuleList, ModuleDict, ParameterList and classes without one."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _is_in_sequential(site: Site) -> bool:
    """Whether it is a composite child of a Sequential that holds no such children itself."""
    sequentials = (part for part in site.module.modules() if isinstance(part, nn.Sequential))
    return (
        isinstance(site.parent, nn.Sequential)
        and _is_composite(site.module)
        and all(is_layer(child) for part in sequentials for child in part.children())
    )


def _is_numbered(site: Site) -> bool:
    """Return whether a composite module has a numbered name, and a sibling of its class has the next."""
    match = _NUMBERED.fullmatch(site.key)
    is_open = isinstance(site.parent, CONTAINERS) or isinstance(site.module, nn.Sequential)
    if match is None or is_open or not _is_composite(site.module):
        return False
    kind = type(site.module)
    alike = [key for key, child in children(site.parent).items() if child is not None and type(original(child)) is kind]
    names = [key for key in alike if (other := _NUMBERED.fullmatch(key)) is not None and other[1] == match[1]]
    return len(names) > 1


def _is_sibling(site: Site) -> bool:
    """Return whether a composite module has a sibling of its class."""
    alike = sum(type(original(child)) is type(site.module) for child in site.parent.children())
    return alike > 1 and _is_composite(site.module)


def original(module: nn.Module) -> nn.Module:
    """Return the module that a stand-in of a pipeline stands for, or else the module itself."""
    return getattr(module, "stands_for", module)


def _is_composite(module: nn.Module) -> bool:
    return not is_layer(module) and not is_never_called(module)


def is_layer(module: nn.Module) -> bool:
    """Whether its parameters are its own: nothing with parameters inside."""
    return not any(has_params(child) for child in module.children())


def has_params(module: nn.Module) -> bool:
    """Whether there is any parameter in it."""
    return next(module.parameters(), None) is not None


def join_path(path: str, name: str) -> str:
    """The path of what is called `name` in the module of that path."""
    return f"{path}.{name}" if path else name


# The class of a module, replaced from outside: paths, parameters, state_dict names and other methods stay.

#: What a new class has of its own, made from the class that it stands on.
Body = Callable[[type], dict[str, Any]]


def replace_class(module: nn.Module, kind: type, body: Body | None = None, **state: Any) -> None:
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
