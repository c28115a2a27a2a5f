"""Poisson draws: each record is in a step with the same probability, independently. A function of (key, step, record).

Records are numbered from 0. Each run of `BLOCK` records has its own Philox stream, so the draw of a record depends on
nothing else, and a resumed run draws the same records.
"""

from __future__ import annotations

import hashlib

import numpy as np

#: Records of one stream.
BLOCK = 2**16


def drawn(key: bytes, step: int, records: int, rate: float) -> np.ndarray:
    """Return the records of a step in ascending order, int64.

    Args:
        key: the secret key.
        step: number of steps done before.
        records: number of records.
        rate: probability with which a record is drawn.
    """
    digest = hashlib.blake2b(str(step).encode(), key=key, digest_size=16, person=b"weft draws").digest()
    stream = np.frombuffer(digest, dtype=np.uint64)
    found: list[np.ndarray] = []
    for block in range(-(-records // BLOCK)):
        generator = np.random.Generator(np.random.Philox(key=stream, counter=[0, 0, 0, block]))
        count = min(BLOCK, records - block * BLOCK)
        found.append(np.flatnonzero(generator.random(BLOCK)[:count] < rate) + block * BLOCK)
    return np.concatenate(found)


def some_of(key: bytes, step: int, unit: int, records: np.ndarray, most: int) -> np.ndarray:
    """Return `most` of a unit's records in ascending order, chosen by (key, step, unit), or all if `most` is 0."""
    if not 0 < most < len(records):
        return records
    digest = hashlib.blake2b(f"{step}\0{unit}".encode(), key=key, digest_size=16, person=b"weft records").digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))
    return np.sort(generator.choice(records, most, replace=False))
