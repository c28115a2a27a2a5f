"""One scalar for each software stack, fitted without the table that it is applied to."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from weft.planner.scoring.prediction import Prediction

#: What another source with the same stack counts as a whole, against one table of the same source.
_OTHER_SOURCE = 0.05
#: What "no scalar" counts, in tables: little evidence moves the scalar little.
_PRIOR = 0.3
#: A table speaks for a scalar of at most this much, as a logarithm: beyond, something else is wrong with it.
_MOST = 0.2


def stack_scalars(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Factor on the predicted step time of each run, by its id.

    A table speaks by the median of log(measured / predicted) over its configurations. The scalar of a stack is the
    weighted mean over the other tables of the run's source and over the other sources with its stack (each by the
    median of its tables), drawn towards 1.
    """
    tables = _tables(predictions)
    factors = {own: _factor(own, tables) for own in {_key(each) for each in predictions}}
    return {each.run.id: factors[_key(each)] for each in predictions}


def _factor(own: tuple[str, str, str], tables: Mapping[tuple[str, str, str], float]) -> float:
    near = [median for key, median in tables.items() if key[:2] == own[:2] and key != own]
    far: dict[str, list[float]] = defaultdict(list)
    for (stack, source, _), median in tables.items():
        if stack == own[0] and source != own[1]:
            far[source].append(median)
    votes = [statistics.median(medians) for medians in far.values()]
    total = sum(map(_clipped, near)) + _OTHER_SOURCE * sum(map(_clipped, votes))
    return math.exp(total / (_PRIOR + len(near) + _OTHER_SOURCE * len(far)))


def _clipped(ratio: float) -> float:
    return min(_MOST, max(-_MOST, ratio))


def _key(each: Prediction) -> tuple[str, str, str]:
    return each.run.job.stack.name, each.run.source, each.run.table


def _tables(predictions: Sequence[Prediction]) -> dict[tuple[str, str, str], float]:
    """Median log ratio of each table with measured times; runs made for scoring alone where a table has any."""
    ratios: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    some_core = any(each.run.core for each in predictions)
    for each in predictions:
        if each.run.measured_s and (each.run.core or not some_core):
            ratios[_key(each)][each.run.group].append(math.log(each.run.measured_s / each.step_s))
    return {
        key: statistics.median(statistics.fmean(group) for group in groups.values()) for key, groups in ratios.items()
    }
