"""A pretrained folder under a model's own names: renamed, stacked and fused as transformers' tables say.

Nothing is converted in memory: a tensor of the model is described as pieces of those in the files.
"""

from __future__ import annotations

import copy
import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.pretrained import Joined, JoinedTensors, StoredWeights, stored_weights
from weft.errors import CheckpointError, ModelError
from weft.parallel.local_tensors import StateSource, originals_of, read_whole
from weft.train.state import model_tensors

_SHOWN = 3


def pretrained_source(
    model: nn.Module, folder: Path, may_lack: Callable[[str], bool] = lambda name: False
) -> tuple[JoinedTensors, list[str]]:
    """Return where a model's tensors are read from, and the stored names that it has no place for.

    Args:
        model: whole, of any device; its first names of tied tensors are those of the result.
        folder: config.json and safetensors files.
        may_lack: whether the folder may lack a tensor, or have it in another shape; the result lacks it then.

    Raises:
        CheckpointError: for files that are missing, cut off or in pickles, for tensors that the model has and the
            folder lacks, and for other shapes.
        ModelError: for a conversion that Weft does not read slice by slice.
    """
    stored = stored_weights(folder)
    entries, left = _under_model_names(model, stored)
    originals, by_first = originals_of(model), defaultdict[str, list[str]](list)
    for name, one in originals.items():
        by_first[one.first].append(name)
    found: dict[str, Joined] = {}
    missing: list[str] = []
    for first, names in by_first.items():
        # Of tied names a folder may hold any.
        here = next((entries[name] for name in names if name in entries), None)
        if may_lack(first) and (here is None or here.shape != originals[first].shape):
            continue
        if here is None:
            missing.append(first)
            continue
        found[first] = here
        if here.shape != originals[first].shape:
            raise CheckpointError(
                f"model.path={folder}: tensor {first!r} has shape {here.shape} in the files, and config.json makes it "
                f"{originals[first].shape}. Give the config.json that belongs to these weights."
            )
    if missing:
        raise CheckpointError(
            f"model.path={folder}: the files lack {_listed(missing)}, which the model of config.json has. "
            "Give the config.json that belongs to these weights."
        )
    unexpected = [*left, *(name for name in entries if name not in originals)]
    return JoinedTensors(stored, found), sorted(unexpected)


def load_pretrained(model: nn.Module, folder: Path) -> None:
    """Give a plain model on one device the weights of its folder.

    Raises:
        CheckpointError, ModelError: as `pretrained_source` raises them.
    """
    fill_whole(model, pretrained_source(model, folder)[0])


@torch.no_grad()
def fill_whole(model: nn.Module, source: StateSource) -> None:
    """Give a plain model on one device what a source has of its tensors."""
    for name, tensor in model_tensors(model).items():
        if name in source.entries:
            tensor.copy_(read_whole(source, name))


def told_unexpected(names: list[str]) -> list[str]:
    """Return a line for people about stored tensors that the model has no place for; none where all are used."""
    return [f"weights: {_listed(names)} of the files not used: the model has no such tensor"] if names else []


def told_new(names: list[str], seed: int) -> list[str]:
    """Return a line for people about tensors that the folder lacks; none where it has all."""
    return [f"weights: {_listed(names)} not in the files: they start anew, from seed={seed} and name"] if names else []


def _under_model_names(model: Any, stored: StoredWeights) -> tuple[dict[str, Joined], list[str]]:
    """What each tensor of the model is made of, and stored names that are to be ignored."""
    plain = {name: Joined.of(name, entry) for name, entry in stored.entries.items()}
    try:
        tables: Any = importlib.import_module("transformers.conversion_mapping")
        core: Any = importlib.import_module("transformers.core_model_loading")
        transforms = tables.get_model_conversion_mapping(model)
    except (ImportError, AttributeError):  # releases before 5 have no tables
        return _with_prefix(model, plain), []
    renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Joined] = {}
    parts: dict[str, dict[str, list[Joined]]] = {}
    for name in sorted(plain, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, copy.deepcopy(renamings), converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if pattern is None:
            found[target] = plain[name]
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(plain[name])
    for target, by_source in parts.items():
        found[target] = _joined(target, by_pattern[next(iter(by_source))], by_source)
    return found, []


def _joined(target: str, converter: Any, parts: Mapping[str, list[Joined]]) -> Joined:
    """Carry out a conversion of transformers on descriptions of tensors."""
    found: dict[str, list[Joined]] = {
        pattern: parts[pattern] for pattern in converter.source_patterns if pattern in parts
    }
    try:
        for operation in converter.operations:
            kind = type(operation).__name__
            if kind == "MergeModulelist":
                found = {pattern: [Joined.stacked(each, operation.dim)] for pattern, each in found.items()}
            elif kind == "Concatenate":
                every = [one for each in found.values() for one in each]
                found = {target: [Joined.end_to_end(every, operation.dim)]}
            else:
                raise ModelError(
                    f"model.path: tensor {target!r} goes through {kind} in transformers, which Weft does not read "
                    "slice by slice. Save it anew with transformers' save_pretrained(save_original_format=False)."
                )
    except ValueError as error:
        raise CheckpointError(f"model.path: tensor {target!r} cannot be put together: {error}. "
                              "Download the folder again.") from error  # fmt: skip
    (whole,) = [one for each in found.values() for one in each]
    return whole


def _with_prefix(model: Any, plain: Mapping[str, Joined]) -> dict[str, Joined]:
    """Names with the prefix of the base model, where a folder was saved from it alone, or without."""
    names, prefix = set(model.state_dict()), f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, Joined] = {}
    for name, one in plain.items():
        ways = (name, prefix + name, name.removeprefix(prefix))
        found[next((way for way in ways if way in names), name)] = one
    return found


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
