"""Plans by energy: the order by energy or CO2, and the Pareto front of time against energy under power caps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.config.cluster import capped
from weft.config.energy import carbon_intensity
from weft.config.plan import Plan
from weft.errors import ConfigError, Problem
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

SortBy = Literal["time", "energy", "co2"]
#: Power caps of the front, as shares of the rated power, and the number of layouts that are estimated under each.
_CAPS, _LAYOUTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), 10


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan under a power cap (W per device) that no other one beats in both time and energy.

    `kwh` is the energy of one step at the building's meter.
    """

    watts: float
    candidate: Candidate
    kwh: float


def grid_of(text: str | None, sort: SortBy) -> float | None:
    """Return the grams of CO2 per kWh of `--grid`, or None without it.

    Raises:
        ConfigError: if it is no grid, or `--sort co2` needs it.
    """
    if text is None:
        if sort == "co2":
            raise _error(
                "sort", "sort=co2: the carbon intensity of the electricity is needed. Add --grid france or 369."
            )
        return None
    try:
        return carbon_intensity(text)
    except ValueError as error:
        raise _error("grid", f"grid={text}: {error}") from None


def ranked_by(found: Answer[Candidate], sort: SortBy) -> Answer[Candidate]:
    """Return the answer with its plans in the order of energy per step, or unchanged for "time".

    All plans of an answer compute the same batch on the same grid, so the order by CO2 is the order by energy.

    Raises:
        ConfigError: if the power of the device is unknown.
    """
    if sort == "time" or not found.ranked:
        return found
    if found.question.cluster.device.watts is None:
        name = found.question.cluster.device.name
        remedy = f"Describe it: CLUSTER 8xmine with --device 'mine like={name} watts=300'"
        remedy = "Leave --sort out" if found.question.cluster.device.is_cpu else remedy
        raise _error("sort", f"sort={sort}: the power of {name} is not known. {remedy}.")
    return replace(found, ranked=tuple(sorted(found.ranked, key=_energy)))


def _energy(one: Candidate) -> float:
    return one.cost().energy_kwh or math.inf


def energy_front(found: Answer[Candidate]) -> list[FrontPoint]:
    """Return the Pareto front of step time and energy, fastest first, [] if the power of the device is unknown.

    The best layouts are estimated at the rated power and under caps. Without a measured matmul rate, the speed under a
    cap is unknown, and only the rated power is considered.
    """
    device = found.question.cluster.device
    if device.watts is None or not found.ranked:
        return []
    plans = [one.plan for one in found.layouts(_LAYOUTS)]
    points: list[FrontPoint] = []
    for cap in _CAPS if device.measured_flops else (1.0,):
        points += _points(plans, found.question, device.watts * cap)
    points.sort(key=lambda one: (one.candidate.step_s, one.kwh))
    front: list[FrontPoint] = []
    for one in points:
        if not front or one.kwh < front[-1].kwh * (1 - 1e-6):
            front.append(one)
    return front


def _points(plans: Sequence[Plan], question: Question, watts: float) -> list[FrontPoint]:
    cluster = question.cluster
    limited = capped(replace(cluster.device, watts=watts), cluster.device.watts)
    changed = replace(question, cluster=replace(cluster, device=limited))
    ranked = estimated(plans, changed)
    return [FrontPoint(watts, one, _energy(one)) for one in ranked if one.fits >= question.fits]


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])
