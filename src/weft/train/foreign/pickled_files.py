"""Pickled weights of a Hugging Face folder, as the confined process reads them: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.train.foreign.taken import NotTaken, Taken, load_weights, within

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: What trainers leave beside the weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
#: Where trainers put the weights in a table of more.
_TABLES = ("state_dict", "model_state_dict", "model", "module")


def read_pickled(source: Path, taken: Taken) -> None:
    """Hand over each tensor by its name. Raises NotTaken for files without weights, or with anything else."""
    seen: set[str] = set()
    for name in _files(source):
        table = load_weights(within(source, name), name, mapped=True)
        for key, tensor in _weights(table, name).items():
            if isinstance(key, str) and isinstance(tensor, torch.Tensor):
                if key in seen:
                    raise NotTaken(f"{name}: tensor {key[:200]!r} stands in another file too")
                seen.add(key)
                taken.tensor((key,), tensor)
            else:
                taken.value((name, str(key)), None)
    if not seen:
        raise NotTaken("its files hold no tensors")


def _files(source: Path) -> list[str]:
    if (source / _INDEX).is_file():
        try:
            return sorted(set(json.loads(within(source, _INDEX).read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NotTaken(f"{_INDEX} cannot be read ({error})") from error
    if (source / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(file.name for pattern in PATTERNS for file in source.glob(pattern))
    found = [name for name in found if not name.startswith(_NO_WEIGHTS)]
    if not found:
        raise NotTaken(f"it has neither {_SINGLE} nor {_INDEX}, nor another pickle of weights")
    return found


def _weights(table: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(table, Mapping):
        raise NotTaken(f"{name}: it holds a {type(table).__name__}, no table of tensors")
    inner = next((table[key] for key in _TABLES if isinstance(table.get(key), Mapping)), None)
    return table if inner is None else inner
