"""Weights of a Hugging Face folder in pickles, handed over by the confined process as plain tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.checkpoint.arrays import RawArray, block_of
from weft.errors import CheckpointError
from weft.train.foreign.into_weft import TABLE, run_confined


def pickled_weights(source: Path, work: Path, limit_s: float) -> tuple[Iterator[tuple[str, RawArray]], list[str]]:
    """Return (name, tensor) of each weight, one at a time in memory, and the names of what is left out.

    Args:
        source: folder with pytorch_model.bin, its index, or other pickles of weights.
        work: an empty folder on a disk that holds the weights once more, for as long as they are read.
        limit_s: how long (s) reading may take.

    Raises:
        CheckpointError: for what cannot be read, or holds anything but weights.
    """
    if not source.is_dir():
        raise CheckpointError(f"SOURCE={source}: there is no such folder. Give the folder of a Hugging Face model.")
    run_confined("pickled", source, work, limit_s, remedy="Give a folder with the weights of a model.")
    said = json.loads((work / TABLE).read_text())
    return _tensors(said["tensors"], work), list(said["left_out"])


def _tensors(table: list[dict[str, Any]], work: Path) -> Iterator[tuple[str, RawArray]]:
    from safetensors import safe_open

    handles: dict[int, Any] = {}
    for one in table:
        number = one["file"]
        if number not in handles:
            handles.clear()  # files follow each other
            handles[number] = safe_open(str(work / f"{number}.safetensors"), framework="pt", device="cpu")
        yield one["place"][0], block_of(handles[number].get_tensor(one["name"]))
