"""Parameter counts of any nn.Module, with its repeated blocks found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weft.errors import ModelError
from weft.spec import DecoderSpec, ModelSpec
from weft.spec.model import LayerSpec
from weft.structure.blocks import CONTAINERS, Site, has_params, join_path, outermost

#: What makes two blocks the same: class, and name, shape and dtype of each parameter.
Kind = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]


def describe(module: nn.Module) -> ModelSpec:
    """Count a module's parameters; it may be on the meta device.

    Children of one container that are alike become one LayerSpec with a count: "blocks.*" when all children are
    alike, else "blocks.{0-3,5}". A weight that several modules share is counted where it is met first.

    Raises:
        ModelError: when a parameter has no shape yet.
    """
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            rule = "a lazy module has no shape yet. Run the model once before describing it."
            raise ModelError(f"parameter {path}: {rule}")
    spec = getattr(module, "spec", None)
    return ModelSpec(
        name=type(module).__name__,
        layers=tuple(_layers(module)),
        shape=spec if isinstance(spec, DecoderSpec) else None,
    )


def _layers(model: nn.Module) -> Iterator[LayerSpec]:
    """One LayerSpec for each group of like parts, in the order in which the groups first appear."""
    sites = _parts(model)
    owners = {inner: site for site in reversed(sites) for inner in site.module.modules()}
    counts: Counter[str] = Counter()  # a part that shares weights with an earlier one has fewer of its own
    for path, parameter in model.named_parameters():
        site = owners.get(model.get_submodule(path.rpartition(".")[0]))
        counts[site.path if site else path] += parameter.numel()
    listed = {site.path: site for site in sites if isinstance(site.parent, CONTAINERS)}
    groups: dict[object, list[str]] = {}
    for path, num_params in counts.items():
        kind = (listed[path].parent, _kind(listed[path].module)) if path in listed else path
        groups.setdefault((kind, num_params), []).append(path)
    for paths in groups.values():
        site, num_params = listed.get(paths[0]), counts[paths[0]]
        if num_params:
            yield LayerSpec(_group_path(site, paths) if site else paths[0], num_params, len(paths))


def _parts(model: nn.Module) -> list[Site]:
    """The outermost modules that repeat in their container, or in which nothing repeats."""
    kinds: dict[nn.Module, Counter[Kind]] = {
        part: Counter(map(_kind, _entries(part))) for part in model.modules() if isinstance(part, CONTAINERS)
    }
    # A ModuleList has blocks even when it is of length one.
    repeats = {
        part for part, found in kinds.items() if any(n > 1 or isinstance(part, nn.ModuleList) for n in found.values())
    }

    def is_part(site: Site) -> bool:
        alike = kinds[site.parent][_kind(site.module)] if site.parent in kinds else 1
        return alike > 1 or repeats.isdisjoint(site.module.modules())

    return outermost(model, is_part)


def _entries(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if has_params(child)]


def _kind(module: nn.Module) -> Kind:
    return type(module), tuple((name, tuple(value.shape), value.dtype) for name, value in module.named_parameters())


def _group_path(site: Site, paths: list[str]) -> str:
    """How like entries of a container are shown: "blocks.*", "blocks.4", "blocks.{0-3,5}". site: of the first."""
    holder = site.path.rpartition(".")[0]
    if len(paths) == len(_entries(site.parent)):
        return join_path(holder, "*")
    if len(paths) == 1:
        return site.path
    return join_path(holder, "{" + ",".join(_runs([path.rpartition(".")[2] for path in paths])) + "}")


def _runs(names: list[str]) -> Iterator[str]:
    """Shorten numbers in sequence: 0 1 2 5 -> 0-2 5. Other names stay."""
    if not all(name.isdigit() for name in names):
        yield from names
        return
    for _, run in groupby(enumerate(names), key=lambda item: int(item[1]) - item[0]):
        numbers = [name for _, name in run]
        yield numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
