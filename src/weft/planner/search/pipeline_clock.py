"""Pipeline simulation of a candidate, stage by stage, and a layer split that balances the ranks.

The closed forms of the estimate distinguish three kinds of stages, the simulation every stage. Of many microbatches,
only enough to fill the pipeline and reach a steady state are simulated. Each other microbatch adds the time that the
longest rank takes for one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.config.pipeline_schedule import stages_of
from weft.errors import PlanError
from weft.planner.cost.pipeline import Durations, makespan_s
from weft.planner.estimator import Estimates
from weft.planner.measured.profile_tables import HostTables
from weft.planner.search.candidate import Candidate
from weft.planner.search.ranks import Passes, best_split, durations, memory_by_rank, passes, schedule_of, stage_layers
from weft.planner.uncertainty import memory_error_scale

#: Terms of work that the longest rank does for every microbatch.
_WORK = ("gemm", "attention", "memory_bound", "host", "recompute", "tp", "cp", "ep")
#: Maximum number of simulated steps of a schedule. Beyond it the closed form is used.
MOST_STEPS = 60_000
#: A split is added to the plan if it gains more than this share.
_WORTH = 0.003


def num_steps(one: Candidate) -> int:
    """Return the approximate number of steps that the simulation would run."""
    plan = one.plan
    return 3 * plan.pp * plan.virtual_stages * min(plan.microbatches, 2 * plan.pp)


def clocked(one: Candidate) -> Candidate:
    """Return the candidate with the simulated bubble of its schedule, and with a better split if there is one.

    A candidate without a pipeline, or whose schedule cannot be simulated, is returned unchanged.
    """
    if one.plan.pp == 1 or one.clocked or isinstance(one.question.tables, HostTables):
        return one  # ranks that share cores wait for each other in ways that the clock does not know
    parts = passes(one)
    try:
        plain = _timed(one, parts, stage_layers(one))
    except (PlanError, ValueError):
        return one
    if one.plan.split or "split" in one.question.fixed:
        return plain
    layers = best_split(one, parts)
    shorter = _longest(one, durations(one, layers, parts)) / _longest(one, durations(one, stage_layers(one), parts))
    if shorter > 1 - _WORTH:
        return plain
    even = _timed(replace(one, plan=one.plan.replace(split=tuple(layers))), parts, layers)
    return even if even.step_s < plain.step_s * (1 - _WORTH) and even.fits >= one.question.fits else plain


def _timed(one: Candidate, parts: Passes, layers: list[int]) -> Candidate:
    seconds = durations(one, layers, parts)
    makespan, longest = _makespan(one, seconds)
    work = one.plan.microbatches * longest
    before = sum(one.terms[name] for name in _WORK)
    terms = {name: value * (work / before if name in _WORK else 1.0) for name, value in one.terms.items()}
    terms["bubble"] = max(0.0, makespan - work)
    ranks = memory_by_rank(one)
    memory = max(ranks, key=lambda each: sum(each.values()))
    found = Estimates(
        terms={},
        memory={name: np.array([value]) for name, value in memory.items()},
        usable_bytes=one.usable_bytes,
        tokens=0.0,
        world_size=np.ones(1, dtype=np.int64),
        memory_spread=memory_error_scale(one.question.job, one.question.cluster),
        host_bytes=np.array([one.host_bytes]),
        host_limit=one.host_limit,
    )
    return replace(
        one,
        terms=terms,
        step_s=sum(terms.values()),
        memory=memory,
        allocated_bytes=float(found.allocated_bytes[0]),
        reserved_bytes=float(found.reserved_bytes[0]),
        total_bytes=float(found.total_bytes[0]),
        fits=float(found.fits_probability[0]),
        clocked=True,
    )


def _makespan(one: Candidate, seconds: Durations) -> tuple[float, float]:
    """Return the seconds of all microbatches, and of one on the longest rank."""
    plan = one.plan
    schedule = schedule_of(one, 2 * plan.pp)
    makespan = makespan_s(schedule, seconds)
    longest = _longest(one, seconds)
    return makespan + (plan.microbatches - schedule.num_microbatches) * longest, longest


def _longest(one: Candidate, seconds: Durations) -> float:
    """Return the seconds of one microbatch on the rank that takes longest."""
    plan = one.plan
    return max(
        sum(_stage_s(seconds, stage) for stage in stages_of(plan.schedule, plan.pp, plan.virtual_stages, rank))
        for rank in range(plan.pp)
    )


def _stage_s(seconds: Durations, stage: int) -> float:
    sides = (seconds.forward_s, seconds.input_gradient_s, seconds.weight_gradient_s)
    return sum(side if isinstance(side, int | float) else side[stage] for side in sides)
