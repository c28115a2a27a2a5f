"""Divisors of whole numbers, for rules that ask what comes out even."""

from __future__ import annotations

import math
from collections.abc import Iterable


def common_divisors(*numbers: int) -> list[int]:
    """Return the whole numbers that divide all of `numbers`, ascending; of an absurdly large number, some of them."""
    smallest = min(numbers)
    low = [divisor for divisor in range(1, min(math.isqrt(smallest), 10_000) + 1) if smallest % divisor == 0]
    every = sorted({*low, *(smallest // divisor for divisor in low)})
    return [divisor for divisor in every if all(number % divisor == 0 for number in numbers)]


def nearest(values: Iterable[int], wanted: int) -> int:
    """The value that lies next to the wanted one; of two the smaller."""
    return min(values, key=lambda value: (abs(value - wanted), value))
