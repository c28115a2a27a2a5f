"""Intervals and tests for paired differences of a few runs. Needs scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import MissingExtra

#: Standard deviation of the effect size (mean over standard deviation) that `sequential` expects.
_EFFECT = 3.0
#: Equal differences that the sign-flip test needs for p < 0.05: 2 / 2**6.
FEWEST_EQUAL = 6
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of paired differences with its interval.

    Attributes:
        mean: mean difference.
        half_width: half width of the interval; inf if there are too few pairs for one.
        num_pairs: number of differences.
        p_t, p_sign: p values of the paired t test and of the sign-flip test; nan with a single pair, and p_t also if
            all differences are equal.
        is_constant: all differences are equal, up to rounding. Their variance is no estimate of the noise, for
            example of an accuracy over few records, so the sign flips alone decide.
    """

    mean: float
    half_width: float
    num_pairs: int
    p_t: float
    p_sign: float
    is_constant: bool = False

    @property
    def is_different(self) -> bool:
        """True if the interval excludes 0."""
        return abs(self.mean) > self.half_width


def fixed(differences: Sequence[float], level: float = 0.95) -> Estimate:
    """Return the interval of the paired t test. It holds if the number of pairs was chosen before the first look."""
    stats, num = _scipy_stats(), len(differences)
    half = math.inf
    if num > 1:
        half = float(stats.t.ppf((1 + level) / 2, num - 1)) * _standard_error(differences)
    return _estimate(differences, half)


def sequential(differences: Sequence[float], level: float = 0.95) -> Estimate:
    """Return an interval that holds at all numbers of pairs together, so that a look after each pair is allowed.

    It inverts the Bayes factor of the t statistic with effect size N(0, 9) and the prior 1/sigma of the scale. Under
    the null hypothesis this factor is a martingale, so it exceeds 1 / (1 - level) with probability 1 - level at most
    (Wang and Ramdas 2023, arXiv 2310.03722). It is inf for the first two pairs.
    """
    num = len(differences)
    half = math.inf
    if num > 1:
        ratio, degrees = 1 + num * _EFFECT**2, num - 1
        bound = (math.sqrt(ratio) / (1 - level)) ** (2 / num)
        if bound < ratio:
            half = math.sqrt(degrees * (bound - 1) / (1 - bound / ratio)) * _standard_error(differences)
    return _estimate(differences, half)


def variance_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the variance of paired over unpaired differences, or nan if it is 0/0."""
    unpaired = statistics.variance(a) + statistics.variance(b)
    paired = statistics.variance([right - left for left, right in zip(a, b, strict=True)])
    return paired / unpaired if unpaired else math.nan


def _estimate(differences: Sequence[float], half_width: float) -> Estimate:
    mean, num = statistics.fmean(differences), len(differences)
    if num == 1:
        return Estimate(mean, math.inf, 1, math.nan, math.nan)
    if max(differences) - min(differences) <= _ROUNDING * max(map(abs, differences)):
        half_width = 0.0 if num >= FEWEST_EQUAL else math.inf
        return Estimate(mean, half_width, num, math.nan, _sign_flips(differences), is_constant=True)
    p_t = 2 * float(_scipy_stats().t.sf(abs(mean) / _standard_error(differences), num - 1))
    return Estimate(mean, half_width, num, p_t, _sign_flips(differences))


def _sign_flips(differences: Sequence[float]) -> float:
    """Return the p value of the mean among those with all signs flipped at random; exact up to 13 pairs."""
    import numpy as np

    result = _scipy_stats().permutation_test(
        (np.asarray(differences),), np.mean, permutation_type="samples", n_resamples=9_999, rng=0
    )
    return float(result.pvalue)


def _standard_error(differences: Sequence[float]) -> float:
    return statistics.stdev(differences) / math.sqrt(len(differences))


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtra("scipy", "ab", "weft ab") from error
    return stats
