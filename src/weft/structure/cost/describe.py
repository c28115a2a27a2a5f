"""Parameter counts of any nn.Module, with its repeated blocks found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.errors import ModelError
from weft.spec import DecoderSpec, ModelSpec
from weft.spec.model import LayerSpec
from weft.structure.blocks import join_path

#: What makes two blocks the same: class, and name, shape and dtype of each parameter.
Kind = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def describe(module: nn.Module) -> ModelSpec:
    """Count a module's parameters; it may be on the meta device.

    Children of one container that are alike become one LayerSpec with a count: "blocks.*" when all children are
    alike, else "blocks.{0-3,5}". A weight that several modules share is counted where it is met first.

    Raises:
        ModelError: when a parameter has no shape yet.
    """
    spec = getattr(module, "spec", None)
    return ModelSpec(
        name=type(module).__name__,
        layers=tuple(_layers(module, "", set())),
        shape=spec if isinstance(spec, DecoderSpec) else None,
    )


def _layers(module: nn.Module, path: str, seen: set[Tensor]) -> Iterator[LayerSpec]:
    for name, parameter in module.named_parameters(recurse=False):
        num_params = _count_new([(join_path(path, name), parameter)], seen)
        if num_params:
            yield LayerSpec(join_path(path, name), num_params)
    if isinstance(module, _CONTAINERS):
        yield from _container_layers(module, path, seen)
        return
    for name, child in module.named_children():
        yield from _child_layers(child, join_path(path, name), join_path(path, name), seen)


def _child_layers(child: nn.Module, path: str, shown_path: str, seen: set[Tensor]) -> Iterator[LayerSpec]:
    if _holds_repeats(child):
        yield from _layers(child, path, seen)
        return
    num_params = _count_new(child.named_parameters(path), seen)
    if num_params:
        yield LayerSpec(shown_path, num_params)


def _container_layers(container: nn.Module, path: str, seen: set[Tensor]) -> Iterator[LayerSpec]:
    """One LayerSpec for each kind of child, in the order in which the kinds first appear."""
    kinds = _kinds(container)
    num_children = sum(len(members) for members in kinds.values())
    for members in kinds.values():
        if len(members) == 1:
            [(name, child)] = members.items()
            shown_path = _group_path(path, [name], num_children)
            yield from _child_layers(child, join_path(path, name), shown_path, seen)
            continue
        by_count: dict[int, list[str]] = {}  # a block that shares weights with an earlier one has fewer of its own
        for name, child in members.items():
            by_count.setdefault(_count_new(child.named_parameters(join_path(path, name)), seen), []).append(name)
        for num_params, names in by_count.items():
            if num_params:
                yield LayerSpec(_group_path(path, names, num_children), num_params, len(names))


def _kinds(container: nn.Module) -> dict[Kind, dict[str, nn.Module]]:
    """The children that have parameters, by kind."""
    kinds: dict[Kind, dict[str, nn.Module]] = {}
    for name, child in container.named_children():
        # named_parameters with the child's name in front, so that an error can say which one it is
        shapes = tuple(
            (key[len(name) :], _shape(key, value), value.dtype) for key, value in child.named_parameters(name)
        )
        if shapes:
            kinds.setdefault((type(child), shapes), {})[name] = child
    return kinds


def _holds_repeats(module: nn.Module) -> bool:
    """Whether there are blocks in it. A list has blocks even when it is of length one."""
    for part in module.modules():
        if isinstance(part, _CONTAINERS):
            least = 1 if isinstance(part, nn.ModuleList) else 2
            if any(len(members) >= least for members in _kinds(part).values()):
                return True
    return False


def _count_new(parameters: Iterable[tuple[str, Tensor]], seen: set[Tensor]) -> int:
    """Values in the parameters that were not met before; they are added to `seen`."""
    total = 0
    for path, parameter in parameters:
        shape = _shape(path, parameter)
        if parameter not in seen:
            seen.add(parameter)
            total += math.prod(shape)
    return total


def _shape(path: str, parameter: Tensor) -> tuple[int, ...]:
    if is_lazy(parameter):
        raise ModelError(f"parameter {path}: a lazy module has no shape yet. Run the model once before describing it.")
    return tuple(parameter.shape)


def _group_path(path: str, names: list[str], num_children: int) -> str:
    if len(names) == num_children:
        return join_path(path, "*")
    if len(names) == 1:
        return join_path(path, names[0])
    return join_path(path, "{" + ",".join(_runs(names)) + "}")


def _runs(names: list[str]) -> Iterator[str]:
    """Shorten numbers in sequence: 0 1 2 5 -> 0-2 5. Other names stay."""
    if not all(name.isdigit() for name in names):
        yield from names
        return
    for _, run in groupby(enumerate(names), key=lambda item: int(item[1]) - item[0]):
        numbers = [name for _, name in run]
        yield numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
