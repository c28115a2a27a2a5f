"""Log-probabilities of answers: of a batch's rows, and the reference's, computed once and kept in the run folder.

N preferences of a set, each with two numbers: of its two rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from weft.checkpoint import list_checkpoints
from weft.errors import DataError
from weft.parallel.layers import check_labels
from weft.parallel.tensor import HeadLogProbs
from weft.train.folder import RunFolder, free_name
from weft.train.task import Forwards
from weft.train.tasks.decoder_loss import IGNORE

_FILE = "reference.safetensors"
#: Batches that a pipeline gets at a time.
_AT_ONCE = 8


def row_log_probs(output: Any, batch: Any) -> torch.Tensor:
    """Return the log-probability of each row's labels, summed, (R,), fp64.

    Args:
        output: logits (R, T, V), or what the head gave in their place.
        batch: with labels, (R, T), already shifted.
    """
    labels = batch["labels"]
    if isinstance(output, HeadLogProbs):
        return output.log_probs.sum(1, dtype=torch.float64)
    check_labels(labels, output.shape[-1], IGNORE)
    logits = output if output.dtype == torch.float64 else output.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(labels.shape).sum(1, dtype=torch.float64)


def ready_reference(
    forwards: Forwards,
    folder: RunFolder,
    key: str,
    sets: Mapping[str, Any],
    collate: Callable[[list[Any]], Any],
    at_once: int,
) -> dict[str, np.ndarray]:
    """Return (N, 2) log-probabilities of each set by the model as it is now, or as the run folder keeps them.

    Args:
        forwards: of the model before the first step.
        folder: of the run; the first rank reads and writes it.
        key: names the data.
        sets: samples by name.
        collate: makes a batch of samples.
        at_once: samples of a batch.

    Raises:
        DataError: where a run goes on whose cache is gone or of other data: the model is no longer the reference.
    """
    path = folder.path / _FILE

    def state() -> str:
        if _key_of(path) == key:
            return "kept"
        return "lost" if list_checkpoints(folder.checkpoints) else "new"

    found = forwards.on_first(state)
    if found == "lost":
        raise DataError(
            f"{path}: the reference's log-probabilities of this run are not there, and the model has been trained "
            f"since. Bring the file back, or use {free_name(folder)} for a new run."
        )
    if found == "new":
        values = {name: _computed(forwards, samples, collate, at_once) for name, samples in sets.items()}
        forwards.on_first(lambda: _write(path, key, values))
        return values
    kept = forwards.on_first(lambda: {name: _read(path, name).tolist() for name in sets})
    return {name: np.array(rows, np.float64).reshape(-1, 2) for name, rows in kept.items()}


def _computed(forwards: Forwards, samples: Any, collate: Callable[[list[Any]], Any], at_once: int) -> np.ndarray:
    """Each rank takes every so many-th sample, in equally many batches: what is beyond the end is left out."""
    total, size = len(samples), forwards.data_size
    if not total:
        return np.zeros((0, 2))
    values = torch.zeros(total, 2, dtype=torch.float64)
    per_rank = -(-total // size)
    starts = range(0, per_rank, at_once)
    for first in range(0, len(starts), _AT_ONCE):
        runs = [
            [number * size + forwards.data_rank for number in range(start, min(start + at_once, per_rank))]
            for start in starts[first : first + _AT_ONCE]
        ]
        made = [collate([samples[index if index < total else 0] for index in run]) for run in runs]
        mixed = [batch["mixed"] for batch in made if "mixed" in batch]
        rows = forwards.rows(made, row_log_probs, of="base")
        if mixed:
            both = zip(rows, forwards.rows(mixed, row_log_probs, of="base"), strict=True)
            rows = [torch.stack(pair, 1) for pair in both]
        for run, found in zip(runs, rows, strict=True):
            for index, pair in zip(run, found.reshape(-1, 2).cpu(), strict=True):
                if index < total:
                    values[index] = pair
    return forwards.total(values).cpu().numpy()


def _key_of(path: Path) -> str | None:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("key")
    except Exception:  # missing or damaged: the library raises its own errors
        return None


def _read(path: Path, name: str) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(path)[name]


def _write(path: Path, key: str, values: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    draft = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: np.ascontiguousarray(one) for name, one in values.items()}, draft, metadata={"key": key})
    os.replace(draft, path)
