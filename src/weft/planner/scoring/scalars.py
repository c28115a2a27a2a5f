"""One scalar for each software stack, fitted without the table that it is applied to."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from weft.planner.scoring.prediction import Prediction

#: What a table of another source with the same stack counts, against one of the same source.
_OTHER_SOURCE = 0.25
#: What "no scalar" counts, in tables: few tables move the scalar little.
_PRIOR = 0.25


def stack_scalars(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Factor on the predicted step time of each run, by its id.

    A table speaks by the median of log(measured / predicted) over its configurations. The scalar of a stack is the
    mean over tables, without the run's own; tables of the same source are the nearest to it, and with few tables it
    stays near 1.
    """
    tables = _tables(predictions)
    factors: dict[tuple[str, str, str], float] = {}
    for own in {_key(each) for each in predictions}:
        total, weights = 0.0, _PRIOR
        for (stack, source, table), median in tables.items():
            if (stack, source, table) == own or stack != own[0]:
                continue
            weight = 1.0 if source == own[1] else _OTHER_SOURCE
            total, weights = total + weight * median, weights + weight
        factors[own] = math.exp(total / weights)
    return {each.run.id: factors[_key(each)] for each in predictions}


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
