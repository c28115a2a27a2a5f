"""Seeding, saving and restoring of the global random generators of torch, numpy and Python."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def preserve_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of the global generators of torch, numpy and Python at exit.

    Args:
        device: a CUDA device whose generator is restored too. Other devices are ignored.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    here, there = torch.get_rng_state(), None if gpu is None else torch.cuda.get_rng_state(gpu)
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(here)
        if gpu is not None and there is not None:
            torch.cuda.set_rng_state(there, gpu)
        random.setstate(pythons)
        np.random.set_state(numpys)


def seed_generators(seed: int, *, devices: bool = True) -> None:
    """Set the seeds of torch's, numpy's and Python's global generators.

    seed: any integer. devices: seed the generators of GPUs too.
    """
    if devices:
        torch.manual_seed(seed % 2**63)
    else:
        torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
