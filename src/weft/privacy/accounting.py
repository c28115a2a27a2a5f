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

#: Least and largest noise that `noise_for` tries, and the relative precision of its result.
_LEAST_NOISE, _MOST_NOISE, _PRECISION = 1e-2, 2000.0, 1e-3

#: Above this epsilon, Renyi differential privacy bounds it (Mironov 2017, arXiv 1702.07476).
_ROUGH = 60.0


class Steps(NamedTuple):
    """Equal steps: noise divided by clip, probability of a record, number of steps."""

    noise: float
    rate: float
    count: int

    @classmethod
    def of_json(cls, saved: Iterable[Any]) -> list[Steps]:
        """Return the steps of an account."""
        return [cls(float(noise), float(rate), int(count)) for noise, rate, count in saved]


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
    # Renyi's bound takes milliseconds, and is above the others.
    while (_renyi([Steps(high, rate, steps)], delta) if accountant == "prv" else spent(high)) > epsilon:
        high *= 2
        if high > _MOST_NOISE:
            raise PlanError(
                f"privacy.epsilon={epsilon:g}: {steps} steps with {rate:.3g} of the records each exceed it at any "
                f"noise up to {_MOST_NOISE:g}. Use a larger epsilon, fewer steps, or a smaller batch."
            )
    above = below = spent(high)
    low = high
    while below <= epsilon:
        high, above, low = low, below, low / 2
        if low < _LEAST_NOISE:
            return high
        below = spent(low)
    # Epsilon is close to a power of the noise, so interpolate the logarithms, and try values near the guess.
    margin = _PRECISION / 4
    while high - low > _PRECISION * high:
        guess = (low + high) / 2
        if math.isfinite(below) and above > 0:
            share = math.log(below / epsilon) / math.log(below / above)
            guess = low * (high / low) ** share
        for tried in (guess * (1 + margin), guess * (1 - margin)):
            if low < tried < high:
                found = spent(tried)
                if found > epsilon:
                    low, below = tried, found
                else:
                    high, above = tried, found
    return high


def _joined(history: Iterable[Steps]) -> list[Steps]:
    counts: dict[tuple[float, float], int] = {}
    for noise, rate, count in history:
        if count:
            counts[noise, rate] = counts.get((noise, rate), 0) + count
    return [Steps(*kind, count) for kind, count in counts.items()]


def _prv(history: Sequence[Steps], delta: float) -> float:
    bound = _renyi(history, delta)
    if not bound <= _ROUGH:  # PRV would need much memory
        return bound
    error = max(1e-3, min(1e-2, bound / 400))
    return min(bound, max(0.0, _epsilon("PRVAccountant", history, delta, eps_error=error)))


def _renyi(history: Sequence[Steps], delta: float) -> float:
    """Return the upper bound of Renyi differential privacy, which is loose and takes milliseconds to compute."""
    found = _epsilon("RDPAccountant", history, delta)
    return found if math.isfinite(found) else math.inf


def _epsilon(kind: str, history: Sequence[Steps], delta: float, **options: float) -> float:
    accountant: Any = getattr(_library("opacus.accountants", "opacus", "privacy.accountant=prv"), kind)()
    accountant.history = [(one.noise, one.rate, one.count) for one in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Renyi orders at the ends of their range, which loosen the first bound
        return float(accountant.get_epsilon(delta, **options))


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
