"""Samples of a user's dataset, with random numbers that depend only on the run's seed, the epoch and the sample.

Random crops, masks and noise are then equal for any number of ranks and workers, and after a resume.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from weft.data.order.stream import derive_key
from weft.data.random_state import preserve_generators, seed_generators


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Position of a sample in training (epoch, batch, position in the batch), and its index in the dataset."""

    epoch: int
    batch: int
    position: int
    index: Any


@dataclass(frozen=True, slots=True)
class Fetched:
    """Samples as the dataset returned them, with the seed of each."""

    samples: Any
    seeds: Sequence[int]


class SeededSamples(Dataset[Any]):
    """A map-style dataset that seeds the global generators for each sample that `__getitems__` fetches.

    `__getitems__` takes a list of `SampleKey` and returns `Fetched`. Datasets that use no random numbers, such as a
    TensorDataset, are not seeded. Reading and setting attributes is forwarded to the dataset, as a `worker_init_fn`
    expects.

    dataset: the user's dataset. seed: the run's seed.
    """

    def __init__(self, dataset: Any, seed: int):
        vars(self).update(_dataset=dataset, _seed=seed, _draws=not _draws_nothing(dataset))

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, places: list[SampleKey]) -> Fetched:
        seeds = [derive_key(self._seed, one.epoch, one.batch, one.position) for one in places]
        indices = [one.index for one in places]
        in_one_call = getattr(self._dataset, "__getitems__", None)
        with _outside_of_workers():
            if in_one_call is not None:
                return Fetched(self._fetch_batch(in_one_call, indices, seeds), seeds)
            return Fetched([self._fetched(index, seed) for index, seed in zip(indices, seeds, strict=True)], seeds)

    def _fetched(self, index: Any, seed: int) -> Any:
        if self._draws:
            seed_generators(seed, devices=False)
        return self._dataset[index]

    def _fetch_batch(self, fetch: Callable[[list[Any]], Any], indices: list[Any], seeds: list[int]) -> Any:
        """Fetch the samples in one call, or one by one once a call has used random numbers."""
        if not self._draws:
            return fetch(indices)
        if not getattr(self, "_draws_together", False):
            seed_generators(seeds[0], devices=False)
            before = _states()
            samples = fetch(indices)
            if _states() == before or not isinstance(samples, list | tuple):
                return samples
            vars(self)["_draws_together"] = True
        found: list[Any] = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_generators(seed, devices=False)
            found += fetch([index])
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


def collate_seeded(collate: Callable[[Any], Any], samples: Any, seed: int) -> Any:
    """Call a collate function, with the global generators seeded unless it is torch's default_collate.

    Args:
        collate: the user's function.
        samples: the samples of a microbatch.
        seed: seed of the first sample.
    """
    if collate is default_collate:
        return collate(samples)
    with _outside_of_workers():
        seed_generators(derive_key(seed, "collate"), devices=False)
        return collate(samples)


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, range)


def _outside_of_workers() -> AbstractContextManager[None]:
    """Return a context that restores the generators at exit, or does nothing in a worker."""
    return preserve_generators() if get_worker_info() is None else contextlib.nullcontext()


def _states() -> tuple[Any, ...]:
    numpys = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpys["pos"], numpys["key"].tobytes()
