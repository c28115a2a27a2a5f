"""A model's repeated blocks: what is recomputed, compiled, gathered and counted one at a time.

`outermost` is the one walk that looks for them. Callers differ in what they ask of a module: recompute and compile
want blocks (`repeated_blocks`), ZeRO 3 also wants large layers outside of them, and `describe` wants what is alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from weft.structure.private_torch import children

LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (nn.Sequential, *LISTS)


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
    """Return the repeated blocks by module path, in the order of the modules; empty where there are none.

    They are the children of the outermost ModuleLists. A model without any has the composite children of its
    Sequentials (a residual network's stages are made so). A block never lies inside another, and a block that is
    listed under several paths has the first.
    """
    in_lists = outermost(model, lambda site: isinstance(site.parent, nn.ModuleList))
    return {site.path: site.module for site in in_lists or outermost(model, _is_in_sequential)}


def _is_in_sequential(site: Site) -> bool:
    """Whether it is a composite child of a Sequential that holds no such children itself."""
    sequentials = (part for part in site.module.modules() if isinstance(part, nn.Sequential))
    return (
        isinstance(site.parent, nn.Sequential)
        and not is_layer(site.module)
        and all(is_layer(child) for part in sequentials for child in part.children())
    )


def is_layer(module: nn.Module) -> bool:
    """Whether its parameters are its own: nothing with parameters inside."""
    return not any(has_params(child) for child in module.children())


def has_params(module: nn.Module) -> bool:
    """Whether there is any parameter in it."""
    return next(module.parameters(), None) is not None


def join_path(path: str, name: str) -> str:
    """The path of what is called `name` in the module of that path."""
    return f"{path}.{name}" if path else name
