"""A lower bound on the epsilon of a run, from canaries: records that a coin put into the data or left out.

After training, each canary has a score, and the audit guesses which canaries were in. Under (epsilon, delta)
differential privacy the number of right guesses is bounded in probability. One run suffices, because the coins are
independent (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846).
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any, NamedTuple

import numpy as np

from weft.errors import MissingExtra

#: Probability with which the bound may be too high.
SIGNIFICANCE = 0.05
_MOST_EPSILON, _PRECISION = 50.0, 1e-3


class Canaries(NamedTuple):
    """Records whose presence a coin decides, int64 in ascending order, and True for those that are in the data."""

    records: np.ndarray
    is_in: np.ndarray

    @property
    def left_out(self) -> np.ndarray:
        """Records that no step draws."""
        return self.records[~self.is_in]


class Audit(NamedTuple):
    """Result: the lower bound of epsilon, with the number of guesses and of right ones that give it."""

    epsilon: float
    guesses: int
    right: int


def choose_canaries(key: bytes, records: int, number: int) -> Canaries:
    """Return the canaries of a run, as a function of its key."""
    digest = hashlib.blake2b(b"canaries", key=key, digest_size=16, person=b"weft canary").digest()
    random = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))
    chosen = np.sort(random.choice(records, min(number, records), replace=False))
    return Canaries(chosen.astype(np.int64), random.random(len(chosen)) < 0.5)


def audit(scores: np.ndarray, is_in: np.ndarray, delta: float) -> Audit:
    """Return a lower bound of epsilon that is right with probability 1 - `SIGNIFICANCE`.

    It guesses that canaries with the highest scores are in the data, and as many with the lowest scores are not. Four
    numbers of guesses are tried, and share the significance.

    Args:
        scores: score of each canary, higher if it is likelier to be in the data.
        is_in: True for canaries in the data.
        delta: the run's delta.
    """
    order, number = np.argsort(scores, kind="stable"), len(scores)
    tried = sorted({max(1, number // (2 * part)) for part in (1, 2, 4, 8)})
    found: list[Audit] = []
    for half in tried:
        right = int(is_in[order[-half:]].sum() + (~is_in[order[:half]]).sum())
        bound = lower_bound(number, 2 * half, right, delta, SIGNIFICANCE / len(tried))
        found.append(Audit(bound, 2 * half, right))
    return max(found)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, significance: float) -> float:
    """Return the largest epsilon for which the p-value of the right guesses is below `significance`."""
    if p_value(canaries, guesses, right, 0.0, delta) >= significance:
        return 0.0
    low, high = 0.0, _MOST_EPSILON
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(canaries, guesses, right, middle, delta) < significance else (low, middle)
    return low


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound of the probability of at least `right` right guesses under (epsilon, delta) privacy.

    With delta=0, each guess is right with probability at most e^epsilon / (1 + e^epsilon), whatever the others are.
    Delta adds at most 2 delta per canary, times the largest rate at which the tail of the binomial grows.
    """
    binom: Any = _scipy_stats().binom
    chance = 1 / (1 + np.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return min(1.0, tail)
    steps = np.arange(1, right + 1)
    rate = float((np.cumsum(binom.pmf(right - steps, guesses, chance)) / steps).max())
    return min(1.0, tail + 2 * delta * canaries * rate)


def _scipy_stats() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ModuleNotFoundError as error:
        raise MissingExtra("scipy", "privacy", "the audit of a private run") from error
