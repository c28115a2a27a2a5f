"""Log-probabilities of a reference model that TRL's trainers compute before training."""

from __future__ import annotations

import importlib
import uuid
from pathlib import Path
from typing import Any


class _EachRank:
    """An accelerator on which each rank is the main process, and waits for no other."""

    is_main_process = True

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self.wait_for_everyone = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def precompute_reference(trainer: Any, precompute: Any, dataset: Any, *args: Any) -> Any:
    """Return the dataset with the columns that TRL's method `precompute` adds. All ranks call it.

    TRL's rank 0 writes a file that all ranks look for. They do not find it if the dataset is in memory, and a late one
    finds it too early. Here each rank has all rows, and writes its own temporary file.
    """
    if trainer.ref_model is None:
        trainer._weft_parallelize()
    folder = importlib.import_module("datasets.fingerprint").get_temporary_cache_files_directory()
    path = str(Path(folder) / f"reference-{uuid.uuid4().hex}.arrow")

    def path_once(fingerprint: str) -> str:
        del dataset._get_cache_file_path  # later calls are for other files
        return path

    dataset._get_cache_file_path = path_once
    accelerator, trainer.accelerator = trainer.accelerator, _EachRank(trainer.accelerator)
    try:
        return precompute(trainer, dataset, *args)
    finally:
        trainer.accelerator = accelerator
