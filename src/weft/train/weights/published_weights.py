"""A pretrained folder's tensors under a model's names: renamed, stacked and fused like in transformers.

A tensor of the model is described as slices of tensors in the files, which are read directly. If that is impossible, it
is computed from full stored tensors when it is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from weft.checkpoint.manifest import FileEntry, TensorEntry
from weft.checkpoint.pretrained import Computed, Joined, JoinedTensors, StoredWeights, stored_weights, under_model_names
from weft.checkpoint.safetensors_files import RangedTensors
from weft.errors import CheckpointError
from weft.parallel.state.flat_slices import StateSource, originals_of, read_full
from weft.train.states.model_state import model_tensors

_SHOWN = 3
#: File in a run's copy of a folder with the rows that were added to embeddings: tensors with this suffix.
ADDED_ROWS, ADDED_SUFFIX = "added_rows.safetensors", " (added)"


def pretrained_source(
    model: nn.Module,
    folder: Path,
    may_lack: Callable[[str], bool] = lambda name: False,
    added: Path | None = None,
) -> tuple[JoinedTensors, list[str]]:
    """Return an object that reads a model's tensors, and the stored names that the model does not use.

    Args:
        model: unsharded, on any device. For tied tensors, the result uses the first name.
        folder: config.json and safetensors files.
        may_lack: returns True for a tensor that may be missing or have another shape in the folder; it is then omitted.
        added: file of rows that follow those of the folder (`added_rows.py`); None or a missing file: no such rows.

    Raises:
        CheckpointError: for missing, truncated or pickled files, missing tensors, other shapes, tied tensors that
            differ, and more blocks than the config has.
    """
    stored = stored_weights(folder)
    entries, left = under_model_names(model, stored)
    originals, by_first = originals_of(model), defaultdict[str, list[str]](list)
    for name, one in originals.items():
        by_first[one.first].append(name)
    if added is not None and added.is_file():
        stored, entries = _with_added_rows(stored, entries, by_first, added)
    _refuse_unequal(by_first, entries, stored, folder)
    found: dict[str, Joined | Computed] = {}
    missing: list[str] = []
    for first, names in by_first.items():
        # A folder may contain any of the tied names.
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
    unexpected = sorted([*left, *(name for name in entries if name not in originals)])
    if (deeper := _beyond_its_list(model, unexpected)) is not None:
        name, path, number = deeper
        raise CheckpointError(
            f"model.path={folder}: the files have tensor {name!r}, and config.json makes only {number} modules in "
            f"{path!r}. Give the config.json that belongs to these weights."
        )
    parameters = {name for name, one in originals.items() if one.is_parameter}
    return JoinedTensors(stored, found, finite=parameters), unexpected


def _with_added_rows(
    stored: StoredWeights, entries: Mapping[str, Joined | Computed], by_first: Mapping[str, list[str]], added: Path
) -> tuple[StoredWeights, dict[str, Joined | Computed]]:
    """Return `stored` and `entries` with the rows of the file `added` after the rows of the folder's tensors."""
    size, where, found = added.stat().st_size, str(added.absolute()), dict(entries)
    more = {key: TensorEntry(where, one.dtype, one.shape) for key, one in RangedTensors(added, size).tensors.items()}
    stored = StoredWeights(stored.folder, {**stored.entries, **more}, {**stored.files, where: FileEntry(size, "")})
    for key, entry in more.items():
        for name in by_first.get(key.removesuffix(ADDED_SUFFIX), ()):
            if isinstance(before := found.get(name), Joined):
                found[name] = Joined.end_to_end([before, Joined.of(key, entry)], 0)
    return stored, found


def _refuse_unequal(
    by_first: Mapping[str, list[str]], entries: Mapping[str, Joined | Computed], stored: StoredWeights, folder: Path
) -> None:
    """Raise CheckpointError if tied tensors have different values in the files. transformers would not tie them."""
    source = JoinedTensors(stored, entries)
    for names in by_first.values():
        present = [name for name in names if name in entries]
        for other in present[1:]:
            if not source.is_equal(present[0], other):
                raise CheckpointError(
                    f"model.path={folder}: config.json ties {present[0]!r} and {other!r}, and their stored values "
                    'differ. Set "tie_word_embeddings": false in config.json, or remove the one that was not '
                    "trained from the files."
                )


def _beyond_its_list(model: nn.Module, unexpected: list[str]) -> tuple[str, str, int] | None:
    """Return a stored tensor of a block beyond the model's last block, the path of the block list, and its length.

    Return None if there is no such tensor. Blocks that transformers ignores on purpose, such as multi-token prediction
    blocks, are allowed.
    """
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    config = getattr(model, "config", None)
    if getattr(config, "num_nextn_predict_layers", None):
        return None
    lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name in unexpected:
        words = name.split(".")
        for place, word in enumerate(words):
            path = ".".join(words[:place])
            is_beyond = word.isdecimal() and path in lists and int(word) >= lists[path]
            if is_beyond and not any(re.search(pattern, name) for pattern in ignored):
                return name, path, lists[path]
    return None


def load_pretrained(model: nn.Module, folder: Path, added: Path | None = None) -> None:
    """Load the weights of a folder into a plain model on one device.

    added: file of rows to append to the folder's embeddings, or None.

    Raises:
        CheckpointError: if the weights cannot be read, or do not fit the model.
    """
    fill_full(model, pretrained_source(model, folder, added=added)[0])


@torch.no_grad()
def fill_full(model: nn.Module, source: StateSource) -> None:
    """Copy the tensors of a source into a plain model on one device. Tensors that the source lacks are unchanged."""
    for name, tensor in model_tensors(model).items():
        if name in source.entries:
            tensor.copy_(read_full(source, name))


def format_unexpected_keys(names: list[str]) -> list[str]:
    """Return a line for users about stored tensors that the model does not use, or [] if all are used."""
    return [f"weights: {_listed(names)} of the files not used: the model has no such tensor"] if names else []


def format_new_keys(names: list[str], seed: int) -> list[str]:
    """Return a line for users about tensors that the folder lacks, or [] if it lacks none."""
    return (
        [f"weights: {_listed(names)} not in the files: they are initialized from seed={seed} and name"] if names else []
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
