"""Bound for the size of Poisson draws (no pydantic: the planner reads it)."""

from __future__ import annotations

import math


def most_drawn(mean: float, rate: float, steps: int, chance: float = 1e-6) -> int:
    """Return a size that no Poisson draw of a run exceeds, except with probability `chance`, by Bernstein's inequality.

    mean: expected size. rate: probability of a record, or 0 for any number of records.
    """
    log = math.log(steps / chance)
    return math.ceil(mean + log / 3 + math.sqrt(log * log / 9 + 2 * log * mean * (1 - rate)))
