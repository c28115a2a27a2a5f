"""Units of a model: the modules whose parameters are gathered, freed and reduced together.

A unit is a repeated block (an entry of a ModuleList or Sequential), or a large layer outside the blocks, such as the
embedding and the head. What remains (final norm, small parameters) belongs to the root, which stays gathered for a
whole step; a large layer is therefore never left there, unless its weight is tied across units.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from weft.structure import blocks, dry_run, hugging_face, layers

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
    parameter with one outside of it is none: a tied embedding and head stay with the root, gathered together. Neither
    is a module whose weights are read outside of its calls, such as a block of which another module calls a part.
    """
    owners: dict[int, set[nn.Module]] = {}  # of each parameter and each module, by its id
    for module in model.modules():
        for owned in (*module.children(), *module.parameters(recurse=False)):
            owners.setdefault(id(owned), set()).add(module)
    order = (
        None
        if hugging_face.is_hugging_face(model) or isinstance(model, layers.KnownModel)
        else dry_run.call_order(model)
    )
    large = LARGE_SHARE * sum(param.numel() for param in model.parameters())

    def is_closed(module: nn.Module) -> bool:
        """Whether no parameter or module in it is also one of a module outside."""
        inside = set(module.modules())
        below = (child for child in inside if child is not module and blocks.has_params(child))
        is_alone = all(owners[id(owned)] <= inside for owned in (*module.parameters(), *below))
        return is_alone and not (order is not None and order.is_read(module))

    def is_unit(site: blocks.Site) -> bool:
        fits = _is_large_layer(site, large) if blocks.is_layer(site.module) else _is_block(site)
        return fits and is_closed(site.module)

    return [Unit(site.path, site.module) for site in blocks.outermost(model, is_unit)]


def _is_large_layer(site: blocks.Site, large: float) -> bool:
    # torch's attention reads the weights of its output projection without calling it.
    called = not isinstance(site.parent, nn.MultiheadAttention)
    return called and sum(param.numel() for param in site.module.parameters()) >= large


def _is_block(site: blocks.Site) -> bool:
    """An entry of a container with a forward of its own: no list of blocks, and no backbone beside a head."""
    module = site.module
    if isinstance(module, blocks.LISTS) or not isinstance(site.parent, blocks.CONTAINERS):
        return False
    if type(module) is nn.Sequential and not all(blocks.is_layer(child) for child in module):
        return False
    containers = (part for part in module.modules() if isinstance(part, blocks.CONTAINERS))
    return _num_alike(site.parent)[type(module)] > 1 or all(
        count == 1 for part in containers for count in _num_alike(part).values()
    )


def _num_alike(container: nn.Module) -> Counter[type[nn.Module]]:
    """How many of its entries that hold layers are of each class."""
    return Counter(type(child) for child in container.children() if not blocks.is_layer(child))
