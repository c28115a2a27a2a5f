"""Epsilon of a history of steps, and noise for an epsilon, by the accountants of Opacus and dp-accounting.

PRV: Gopi et al. 2021, arXiv 2106.02848. PLD: Koskela et al. 2020, arXiv 1906.03049. Both bound the subsampled Gaussian
mechanism with Poisson draws, in the relation of adding or removing one record.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from weft.errors import MissingExtra, PlanError

#: Largest noise that `noise_for` tries, and the relative precision of its result.
_MOST_NOISE, _PRECISION = 2000.0, 1e-3


class Steps(NamedTuple):
    """Equal steps: noise divided by clip, probability of a record, number of steps."""

    noise: float
    rate: float
    count: int


def epsilon_of(history: Iterable[Steps], delta: float, accountant: str = "prv") -> float:
    """Return the epsilon of a history of steps; 0 without steps, and infinity without noise.

    Raises:
        MissingExtra: if the accountant's library is not installed.
    """
    joined = _joined(history)
    if not joined:
        return 0.0
    if any(one.noise <= 0 for one in joined):
        return math.inf
    return _prv(joined, delta) if accountant == "prv" else _pld(joined, delta)


def noise_for(epsilon: float, delta: float, rate: float, steps: int, accountant: str = "prv") -> float:
    """Return the least noise with which `steps` steps have at most this epsilon, to one part in a thousand.

    Raises:
        PlanError: if no noise reaches it.
        MissingExtra: if the accountant's library is not installed.
    """

    def spent(noise: float) -> float:
        return epsilon_of([Steps(noise, rate, steps)], delta, accountant)

    high = 1.0
    while spent(high) > epsilon:
        high *= 2
        if high > _MOST_NOISE:
            raise PlanError(
                f"privacy.epsilon={epsilon:g}: {steps} steps with {rate:.3g} of the records each exceed it at any noise up "
                f"to {_MOST_NOISE:g}. Use a larger epsilon, fewer steps, or a smaller batch."
            )
    low = high / 2
    while low > 1e-2 and spent(low) <= epsilon:
        high, low = low, low / 2
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def _joined(history: Iterable[Steps]) -> list[Steps]:
    counts: dict[tuple[float, float], int] = {}
    for noise, rate, count in history:
        if count:
            counts[noise, rate] = counts.get((noise, rate), 0) + count
    return [Steps(*kind, count) for kind, count in counts.items()]


def _prv(history: Sequence[Steps], delta: float) -> float:
    kind: Any = _library("opacus.accountants", "opacus", "privacy.accountant=prv").PRVAccountant
    found = kind()
    found.history = [(one.noise, one.rate, one.count) for one in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return max(0.0, float(found.get_epsilon(delta)))
        except (RuntimeError, ValueError, OverflowError):  # it cannot bound an epsilon this large
            return math.inf


def _pld(history: Sequence[Steps], delta: float) -> float:
    losses: Any = _library("dp_accounting.pld.privacy_loss_distribution", "dp-accounting", "privacy.accountant=pld")
    total: Any = None
    for noise, rate, count in history:
        one = losses.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3)
        composed = one.self_compose(count)
        total = composed if total is None else total.compose(composed)
    return float(total.get_epsilon_for_delta(delta))


def _library(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith((error.name or " ").partition(".")[0]):
            raise
        raise MissingExtra(package, "privacy", purpose) from error
