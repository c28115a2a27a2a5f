"""Seeding, saving and restoring of the global random generators of torch, numpy and Python."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from weft.devices import access


@contextlib.contextmanager
def preserve_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of the global generators of torch, numpy and Python at exit.

    Args:
        device: a device whose generator is restored too.
    """
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with access.forked_generators(device):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def seed_generators(seed: int, *, devices: bool = True) -> None:
    """Set the seeds of torch's, numpy's and Python's global generators.

    seed: any integer. devices: seed the generators of GPUs too.
    """
    if devices and torch.accelerator.is_available():  # otherwise torch remembers each call and its stack
        torch.manual_seed(seed % 2**63)
    else:
        torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
