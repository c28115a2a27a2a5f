"""A model's repeated blocks, the units of recompute, compilation, gathering and counting.

`outermost` is the shared traversal. Callers differ in the modules that they select: recompute and compile select blocks
(`repeated_blocks`), ZeRO 3 also selects large layers outside them, and `describe` selects identical modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.models.inspect.private_torch import children
from weft.models.keras_model import KerasVariables

LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (nn.Sequential, *LISTS)
_NUMBERED = re.compile(r"(.*?)\d+")


@dataclass(frozen=True, slots=True)
class Site:
    """A module's position in the model: its parent module and its name there."""

    parent: nn.Module
    key: str
    path: str

    @property
    def module(self) -> nn.Module:
        """The module at this position now."""
        found = children(self.parent)[self.key]
        assert found is not None
        return found


def outermost(model: nn.Module, is_wanted: Callable[[Site], bool]) -> list[Site]:
    """Return the selected sites below `model` in module order.

    Modules inside a selected one and modules without parameters are excluded. A module with several sites is returned
    at the first selected one.
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
    """Return the repeated blocks by module path, in the order of registration. The result is empty without blocks.

    A block is a module with a forward. A module is composite if it has a child with parameters. The blocks are the
    outermost modules among these:

    - entries of ModuleLists, and of ModuleDicts with numbers as keys or with two entries of one class;
    - composite children of Sequentials (such as a residual network's stages);
    - composite modules of one class with numbered names (`layer0`, `layer1`) or, without other blocks, any names.

    Lists inside a list and modules without a forward are never called, so their entries are the blocks. Blocks are
    never nested. A block with several paths is returned under the first.
    """
    return {site.path: site.module for site in block_sites(model)}


def block_sites(model: nn.Module) -> list[Site]:
    """Return the repeated blocks, as defined in `repeated_blocks`, as sites in the order of registration."""
    lists = _open_lists(model)
    listed = outermost(model, lambda site: site.parent in lists and not is_never_called(site.module))
    found = listed
    for is_wanted in (_is_in_sequential, _is_numbered):
        around = outermost(model, is_wanted)
        # A single module that contains all blocks, such as an encoder between two layers, is not a repeated block.
        if _inside(found, around) and (len(around) > 1 or (around and not found)):
            found = around
    return found or outermost(model, _is_sibling)


def _inside(sites: Sequence[Site], around: Sequence[Site]) -> bool:
    """Return True if each of the sites is inside one of `around`, or if there are no sites."""
    return all(any(site.path.startswith(f"{outer.path}.") for outer in around) for site in sites)


def _open_lists(model: nn.Module) -> set[nn.Module]:
    """Return the containers whose children are blocks.

    These are each ModuleList, each ModuleDict of repeated modules, and containers without a forward inside them.
    """
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
    """Return True if the entries of a ModuleDict are blocks, and not different parts by name."""
    kinds = Counter(type(child) for child in map(original, entries.children()) if _is_composite(child))
    numbers = [key for key in entries if key.isdecimal()]
    return len(numbers) == len(entries) > 0 or max(kinds.values(), default=0) > 1


def is_never_called(module: nn.Module) -> bool:
    """Return True if a module has no forward: ModuleList, ModuleDict, ParameterList and classes without one."""
    # TorchScript's classes have a `forward` that only instances can read.
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module)


def _is_in_sequential(site: Site) -> bool:
    """Return True for a composite child of a Sequential that contains no composite children of Sequentials."""
    sequentials = (part for part in site.module.modules() if isinstance(part, nn.Sequential))
    return (
        isinstance(site.parent, nn.Sequential)
        and _is_composite(site.module)
        and all(is_layer(child) for part in sequentials for child in part.children())
    )


def _is_numbered(site: Site) -> bool:
    """Return True if a composite module has a numbered name and a sibling of its class has another number."""
    match = _NUMBERED.fullmatch(site.key)
    is_open = isinstance(site.parent, CONTAINERS) or isinstance(site.module, nn.Sequential)
    if match is None or is_open or not _is_composite(site.module):
        return False
    kind = type(site.module)
    alike = [key for key, child in children(site.parent).items() if child is not None and type(original(child)) is kind]
    names = [key for key in alike if (other := _NUMBERED.fullmatch(key)) is not None and other[1] == match[1]]
    return len(names) > 1


def _is_sibling(site: Site) -> bool:
    alike = sum(type(original(child)) is type(site.module) for child in site.parent.children())
    return alike > 1 and _is_composite(site.module)


def original(module: nn.Module) -> nn.Module:
    """Return the module that a pipeline placeholder represents, or else the module itself."""
    return getattr(module, "stands_for", module)


def _is_composite(module: nn.Module) -> bool:
    return not is_layer(module) and not is_never_called(module)


def is_layer(module: nn.Module) -> bool:
    """Return True if no child of the module has parameters, except the variables of a Keras layer."""
    return not any(has_params(child) for child in module.children() if not isinstance(child, KerasVariables))


def has_params(module: nn.Module) -> bool:
    """Return True if the module or a submodule has a parameter."""
    return next(module.parameters(), None) is not None


def join_path(path: str, name: str) -> str:
    """Return the path of the child `name` of the module at `path`."""
    return f"{path}.{name}" if path else name


# Replacing the class of a module in place: paths, parameters, state_dict names and other methods are unchanged.

#: Returns the members of a new class, from its base class.
Body = Callable[[type], dict[str, Any]]


def replace_class(module: nn.Module, kind: type, body: Body | None = None, inside: bool = False, **state: Any) -> None:
    """Replace the module's class in place by one that derives from `kind` and from its own class.

    Args:
        module: its class is replaced.
        kind: the first base of the new class, or the second if `inside`. It references its subclasses weakly, so they
            are freed with their modules.
        body: returns additional members of the new class. It must be the same for every call with this kind and class.
        inside: True if `super().forward` of the own class calls `kind`, which must derive from the same torch class.
        **state: attributes to set on the module, each with the prefix `_weft_`.
    """
    own = type(module)
    bases = (own, kind) if inside else (kind, own)
    module.__class__ = _known(kind, bases) or _made(own, bases, body)
    for name, value in state.items():
        setattr(module, f"_weft_{name}", value)


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class, or of the user's class if fully_shard derived one from it."""
    kinds = (kind for kind in type(module).__mro__ if all(base.__name__ != "FSDPModule" for base in kind.__mro__))
    return next(kinds).__name__


def revert(module: nn.Module, kind: type) -> None:
    """Restore the module's class from before `replace_class` with `kind`, if that was the last replacement."""
    bases = type(module).__bases__
    if len(bases) == 2 and bases[0] is kind:
        module.__class__ = bases[1]


def class_before(module: nn.Module) -> type:
    """Return the module's original class, before any replacement."""
    now = type(module)
    named = (now.__module__, now.__qualname__)
    return [kind for kind in now.__mro__ if (kind.__module__, kind.__qualname__) == named][-1]


def _known(kind: type, bases: tuple[type, type]) -> type | None:
    # type's own list of subclasses is the cache: it holds them weakly, so a model's classes go when the model goes.
    return next((one for one in kind.__subclasses__() if one.__bases__ == bases), None)


def _made(own: type, bases: tuple[type, type], body: Body | None) -> type:
    members = body(own) if body is not None else {}
    # The new class has the original's name and module, so code that checks the class name still works.
    return type(own.__name__, bases, {"__module__": own.__module__, "__qualname__": own.__qualname__, **members})
