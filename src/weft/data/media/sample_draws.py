"""What is drawn at random for a sample: a function of its key alone, on any rank, in any order and after a resume."""

from __future__ import annotations

import hashlib

import numpy as np


def drawn_from(key: tuple[int | str, ...]) -> np.random.Generator:
    """Return the generator of a key, such as (seed, epoch, index)."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
