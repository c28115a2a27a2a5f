"""Units of a model: the modules whose parameters are gathered, freed and reduced together.

A unit is a repeated block (an entry of a ModuleList or Sequential), or a large layer outside the blocks, such as the
embedding and the head. What remains (final norm, small parameters) belongs to the root, which stays gathered for a
whole step; a large layer is therefore never left there, unless its weight is tied across units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (nn.Sequential, *_LISTS)
#: A layer outside the blocks becomes a unit from this share of all parameters on.
LARGE_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit. name: its path in the model, as users write it; "" is the root."""

    name: str
    module: nn.Module

    def __str__(self) -> str:
        return self.name or "the root module"


def find_units(model: nn.Module) -> list[Unit]:
    """Units below the root, in the order in which the model lists them. No unit lies inside another.

    A module that is registered at several places, and called from each, is one unit. A module that shares a
    parameter with one outside of it is none: a tied embedding and head stay with the root, gathered together.
    """
    return _Search(model).units


class _Search:
    """One walk over the modules of a model."""

    def __init__(self, model: nn.Module):
        self.units: list[Unit] = []
        self._owners: dict[int, set[int]] = {}
        self._parents: dict[int, set[int]] = {}
        for module in model.modules():
            for child in module.children():
                self._parents.setdefault(id(child), set()).add(id(module))
            for param in module.parameters(recurse=False):
                self._owners.setdefault(id(param), set()).add(id(module))
        self._large = LARGE_SHARE * sum(param.numel() for param in model.parameters())
        self._seen: set[int] = {id(model)}
        self._children(model, "")

    def _children(self, module: nn.Module, path: str) -> None:
        kinds = Counter(type(child) for child in module.children() if not _is_layer(child))
        for name, child in module.named_children():
            if id(child) in self._seen or not _has_params(child):
                continue
            self._seen.add(id(child))
            listed = isinstance(module, _CONTAINERS)
            alike = kinds[type(child)] > 1
            self._visit(child, f"{path}.{name}" if path else name, module, listed, alike)

    def _visit(self, module: nn.Module, path: str, parent: nn.Module, listed: bool, alike: bool) -> None:
        """Make `module` a unit or look inside it. listed: an entry of a container. alike: with siblings of its kind."""
        if self._is_closed(module) and (
            self._is_large_layer(module, parent)
            if _is_layer(module)
            else listed and _is_block(module) and (alike or not _holds_blocks(module))
        ):
            self.units.append(Unit(path, module))
        else:
            self._children(module, path)

    def _is_closed(self, module: nn.Module) -> bool:
        """Whether no parameter or module in it is also one of a module outside."""
        inside = {id(child) for child in module.modules()}
        below = [child for child in module.modules() if child is not module and _has_params(child)]
        return all(self._owners[id(param)] <= inside for param in module.parameters()) and all(
            self._parents[id(child)] <= inside for child in below
        )

    def _is_large_layer(self, module: nn.Module, parent: nn.Module) -> bool:
        # torch's attention reads the weights of its output projection without calling it.
        called = not isinstance(parent, nn.MultiheadAttention)
        return called and sum(param.numel() for param in module.parameters()) >= self._large


def _is_layer(module: nn.Module) -> bool:
    """Whether its parameters are its own: nothing with parameters inside."""
    return not any(_has_params(child) for child in module.children())


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    """Something with a forward of its own, and not just a list of blocks."""
    if isinstance(module, _LISTS):
        return False
    return not (type(module) is nn.Sequential and any(not _is_layer(child) for child in module))


def _holds_blocks(module: nn.Module) -> bool:
    """Whether repeated blocks are somewhere inside."""
    return any(count > 1 for container in _containers(module) for count in _block_kinds(container).values())


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.modules() if isinstance(child, _CONTAINERS))


def _block_kinds(container: nn.Module) -> Counter[type]:
    return Counter(type(child) for child in container.children() if not _is_layer(child))
