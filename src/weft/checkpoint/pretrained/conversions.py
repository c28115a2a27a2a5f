"""What transformers does to stored tensors before a model has them, as descriptions: renamed, joined, cut, turned.

Nothing is read here. A conversion of another kind is carried out by transformers itself when its tensor is asked for.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.checkpoint.arrays import torch_formats
from weft.checkpoint.pretrained.joined_tensors import Computed, Joined
from weft.checkpoint.pretrained.weights_folder import StoredWeights
from weft.errors import CheckpointError

#: Tensors by the pattern of a table that they came by, as they go through the operations of a conversion.
_Parts = dict[str, list[Joined]]


class _NotDescribed(Exception):
    """An operation moves elements in a way that pieces do not describe."""


def under_model_names(model: Any, stored: StoredWeights) -> tuple[dict[str, Joined | Computed], list[str]]:
    """Return what each tensor of a model is made of, and the stored names that the model has no place for.

    Args:
        model: of transformers, as shapes.
        stored: what its folder has.

    Raises:
        CheckpointError: for tensors that cannot be put together as the model's class says.
    """
    plain = {name: Joined.of(name, entry) for name, entry in stored.entries.items()}
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    try:
        tables: Any = importlib.import_module("transformers.conversion_mapping")
        core: Any = importlib.import_module("transformers.core_model_loading")
        transforms = tables.get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # releases before 5 have no tables
        return _with_prefix(plain, state, prefix)
    renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Joined | Computed] = {}
    left: list[str] = []
    parts: dict[str, dict[str, list[str]]] = {}
    for name in sorted(plain, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = core.rename_source_key(name, [], [], prefix, state)
        if target not in state:
            left.append(name)
        elif pattern is None:
            found[target] = plain[name]
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, names in parts.items():
        converter = by_pattern[next(iter(names))]
        found |= _converted(target, converter, names, plain, model)
    return found, left


def _converted(
    target: str, converter: Any, names: Mapping[str, Sequence[str]], plain: Mapping[str, Joined], model: Any
) -> dict[str, Joined | Computed]:
    """What comes out of one conversion, by the model's names."""
    # In the table's order: how tensors are joined follows it.
    parts = {
        pattern: [plain[name] for name in names[pattern]] for pattern in converter.source_patterns if pattern in names
    }
    try:
        for operation in converter.operations:
            parts = _described(operation, parts, converter, target, model)
        whole = {pattern: one for pattern, (one,) in parts.items()}
        return dict(_named(target, whole))
    except (_NotDescribed, ValueError):  # ValueError: parts that differ, of which transformers may make one yet
        return _computed(target, converter, names, plain, model)


def _described(operation: Any, parts: _Parts, converter: Any, target: str, model: Any) -> _Parts:
    """Carry out one operation of transformers on descriptions of tensors."""
    kind, targets = type(operation).__name__, list(converter.target_patterns)
    if kind == "MergeModulelist":
        stacked = {pattern: [Joined.stacked(each, operation.dim)] for pattern, each in parts.items()}
        return {targets[0]: stacked.popitem()[1]} if len(stacked) == 1 else stacked
    if kind == "Concatenate" and len(targets) == 1:
        return {targets[0]: [Joined.end_to_end([one for each in parts.values() for one in each], operation.dim)]}
    if len(parts) != 1 or len(one := next(iter(parts.values()))) != 1:
        raise _NotDescribed
    pattern, whole = next(iter(parts)), one[0]
    if kind == "Chunk" and operation.num_shards_attribute is None:
        size = -(-whole.shape[operation.dim] // len(targets))
        return _cut(whole, operation.dim, [size] * len(targets), targets)
    if kind == "Split":
        shapes = [model.get_parameter(target.replace(targets[0], each)).shape for each in targets]
        return _cut(whole, operation.dim, [shape[operation.dim] for shape in shapes], targets)
    if kind == "Transpose":
        is_turned = not operation.check_dims or whole.shape != tuple(model.get_parameter(target).shape)
        turned = whole.turned(operation.dim0, operation.dim1) if is_turned else whole
        return {targets[0] if len(targets) == 1 else pattern: [turned]}
    raise _NotDescribed


def _cut(whole: Joined, dim: int, sizes: Sequence[int], targets: Sequence[str]) -> _Parts:
    if sum(sizes) != whole.shape[dim]:
        raise _NotDescribed
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    cuts = zip(targets, sizes, ends, strict=True)
    return {target: [whole.cut(dim, end - size, end)] for target, size, end in cuts}


def _named(target: str, whole: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Full names in place of patterns: what stands before and after the pattern in the first of them is common."""
    first = next((pattern for pattern in whole if pattern in target), None)
    before, _, after = target.partition(first) if first is not None else ("", "", "")
    return ((f"{before}{pattern}{after}" if first is not None else pattern, one) for pattern, one in whole.items())


def _computed(
    target: str, converter: Any, names: Mapping[str, Sequence[str]], plain: Mapping[str, Joined], model: Any
) -> dict[str, Joined | Computed]:
    """Leave a conversion to transformers, whole tensor by whole tensor; shapes come from doing it without data."""
    formats = torch_formats()

    def carry_out(tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        working = copy.deepcopy(converter)
        for pattern, each in names.items():
            for name in each:
                working.add_tensor(target, name, pattern, tensor_of(name))
        made = working.convert(target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    try:
        shapes = carry_out(lambda name: torch.empty(plain[name].shape, dtype=formats[plain[name].dtype], device="meta"))
    except Exception as error:  # what it raises depends on the shapes that it is given
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        kinds = ", ".join(type(one).__name__ for one in converter.operations)
        raise CheckpointError(
            f"model.path: tensor {target!r} cannot be put together ({kinds}: {first}). Give the config.json that "
            "belongs to these weights."
        ) from error
    back = {dtype: name for name, dtype in formats.items()}
    return {name: Computed(tuple(one.shape), back[one.dtype], name, carry_out) for name, one in shapes.items()}


def _with_prefix(
    plain: Mapping[str, Joined], state: Mapping[str, Any], base: str
) -> tuple[dict[str, Joined | Computed], list[str]]:
    """Names with the prefix of the base model, where a folder was saved from it alone, or without."""
    prefix = f"{base}."
    found: dict[str, Joined | Computed] = {}
    left: list[str] = []
    for name, one in plain.items():
        way = next((way for way in (name, prefix + name, name.removeprefix(prefix)) if way in state), None)
        if way is None:
            left.append(name)
        else:
            found[way] = one
    return found, left
