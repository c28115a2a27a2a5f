"""One plan in detail: time and schedule of its pipeline, bytes of each rank, and a balanced split of the layers.

The closed forms of the estimate distinguish three kinds of stages; this simulation has every stage. If there are many
microbatches, only enough to fill the pipeline and reach a steady state are simulated. Each other microbatch adds the
time that the slowest rank takes for one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.config.partitioning import divide_by_rank
from weft.config.pipeline_schedule import Schedule, build_schedule, stages_of
from weft.errors import PlanError, Problem
from weft.planner.cost.memory import rank_bytes
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.cost.pipeline import Durations, makespan_s
from weft.planner.estimator import Estimates, costs_of_layer
from weft.planner.search.candidate import Candidate
from weft.planner.space.columns import Columns
from weft.planner.uncertainty import memory_error_scale

#: Terms of compute that the slowest rank repeats for every microbatch.
_WORK = ("gemm", "attention", "memory_bound", "host", "recompute", "tp", "cp", "ep")
#: Maximum number of simulated steps of a schedule. For longer schedules the closed form is used.
MOST_STEPS = 60_000
#: A split is added to the plan if it is faster by more than this share.
_WORTH = 0.003


class PassSeconds(NamedTuple):
    """Time (s) of one microbatch in one layer, in the embedding, or in the head."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


class Passes(NamedTuple):
    """Time (s) of one microbatch in a layer, in the embedding, in head and loss."""

    layer: PassSeconds
    embedding: PassSeconds
    head: PassSeconds


def passes(one: Candidate) -> Passes:
    """Return the estimated time (s) of one microbatch in each part of a candidate.

    It includes recompute and communication between ranks.
    """
    question, plan = one.question, one.plan
    costs = costs_of_layer(question.job, question.cluster, Columns.of([plan], question.job), question.tables)

    def first(*names: str) -> float:
        return sum(float(np.asarray(getattr(costs, name))[0]) for name in names)

    forward, backward = (
        first(*(f"{name}_{side}" for name in ("gemm", "attn", "memory", "tp", "cp", "ep"))) for side in "fb"
    )
    weights = 0.0 if plan.compile else min(first("wgrad"), backward)
    each = plan.microbatches_per_step * question.job.shape.layers / plan.pp
    head, products = first("head_gemm", "head_memory", "head_tp"), first("head_gemm") / 3
    embedding = first("embed", "embed_tp")
    return Passes(
        layer=PassSeconds(
            forward + one.terms.get("host", 0.0) / each,
            backward - weights + one.terms.get("recompute", 0.0) / each,
            weights,
        ),
        embedding=PassSeconds(embedding / 2, 0.0, embedding / 2),
        head=PassSeconds((head - products) / 2, (head - products) / 2, products),
    )


def stage_layers(one: Candidate) -> list[int]:
    """Return the layers of each stage of a candidate's pipeline, starting at the embedding.

    This is the plan's split, or the runtime's default, which depends on parameter counts only.
    """
    plan = one.plan
    return list(plan.split or one.question.job.shape.stage_layers(plan.pp * plan.virtual_stages))


def _stages(one: Candidate) -> list[tuple[int, ...]]:
    plan = one.plan
    return [tuple(stages_of(plan.schedule, plan.pp, plan.virtual_stages, rank)) for rank in range(plan.pp)]


def best_split(one: Candidate, parts: Passes) -> list[int]:
    """Return the split that minimizes the estimated time of the slowest rank."""
    first, last = (sum(end) / sum(parts.layer) for end in (parts.embedding, parts.head))
    return divide_by_rank(one.question.job.shape.layers, _stages(one), first=first, last=last)


def _durations(layers: list[int], parts: Passes) -> Durations:
    sides = np.outer(parts.layer, layers)
    sides[:, 0] += parts.embedding
    sides[:, -1] += parts.head
    forward, backward, weight_grad = (list(map(float, side)) for side in sides)
    return Durations(forward, backward, weight_grad)


def _schedule(one: Candidate, most_microbatches: int) -> Schedule:
    plan = one.plan
    count = min(plan.microbatches, max(most_microbatches, 2 * plan.pp))
    if count < plan.microbatches:
        count -= count % plan.pp
    return build_schedule(plan.schedule, plan.pp, count, plan.virtual_stages)


def memory_by_rank(one: Candidate) -> list[dict[str, float]]:
    """Return the bytes by class on every rank of the pipeline; one entry without a pipeline."""
    question, plan = one.question, one.plan
    if plan.pp == 1:
        return [dict(one.memory)]
    columns = Columns.of([plan], question.job)
    layers = stage_layers(one)
    found: list[dict[str, float]] = []
    for rank, own in enumerate(_stages(one)):
        held = np.array([float(sum(layers[stage] for stage in own))])
        place = (held, rank, 0 in own, len(layers) - 1 in own)
        if plan.recompute_blocks:
            columns = columns.with_arrays(recompute_share=np.minimum(1.0, plan.recompute_blocks / held))
        layer = layer_bytes(question.job, columns)
        device_bytes = 0 if question.cluster.device.is_cpu else question.cluster.device.memory_bytes
        classes = rank_bytes(question.job, columns, question.tables, layer, place, device_bytes)
        found.append({name: float(value[0]) for name, value in classes.items()})
    return found


def timed_schedule(one: Candidate, most_microbatches: int = 32) -> tuple[Schedule, Durations]:
    """Return the candidate's schedule with its times, for drawing.

    The schedule has at most `most_microbatches` microbatches, or 2 * pp if that is more.

    Raises:
        PlanError: if there is no pipeline.
    """
    if one.plan.pp == 1:
        rule = "the plan has no pipeline to draw. Add --fix pp=4, or leave --draw out."
        raise PlanError([Problem("pp", f"pp=1: {rule}")])
    return _schedule(one, most_microbatches), _durations(stage_layers(one), passes(one))


def num_steps(one: Candidate) -> int:
    """Return the approximate number of steps that the simulation would run."""
    plan = one.plan
    return 3 * plan.pp * plan.virtual_stages * min(plan.microbatches, 2 * plan.pp)


def clocked(one: Candidate) -> Candidate:
    """Return the candidate with the simulated bubble and memory of its schedule, and with a better split if found.

    A candidate without a pipeline, or whose schedule is simulated already or cannot be simulated, is returned
    unchanged.
    """
    if one.plan.pp == 1 or one.clocked:
        return one
    parts, usual = passes(one), stage_layers(one)
    try:
        plain = _timed(one, parts, usual)
    except (PlanError, ValueError):
        return one
    if one.plan.split or "split" in one.question.fixed:
        return plain
    layers = best_split(one, parts)
    if _longest_s(one, _durations(layers, parts)) > (1 - _WORTH) * _longest_s(one, _durations(usual, parts)):
        return plain
    even = _timed(replace(one, plan=one.plan.replace(split=tuple(layers))), parts, layers)
    return even if even.step_s < plain.step_s * (1 - _WORTH) and even.fits >= one.question.fits else plain


def _timed(one: Candidate, parts: Passes, layers: list[int]) -> Candidate:
    seconds, schedule = _durations(layers, parts), _schedule(one, 2 * one.plan.pp)
    longest = _longest_s(one, seconds)
    work = one.plan.microbatches * longest
    makespan = makespan_s(schedule, seconds) + (one.plan.microbatches - schedule.num_microbatches) * longest
    before = sum(one.terms[name] for name in _WORK)
    terms = {name: value * (work / before if name in _WORK else 1.0) for name, value in one.terms.items()}
    terms["bubble"] = max(0.0, makespan - work)
    memory = max(memory_by_rank(one), key=lambda each: sum(each.values()))
    found = Estimates(
        terms={},
        memory={name: np.array([value]) for name, value in memory.items()},
        usable_bytes=one.usable_bytes,
        tokens=0.0,
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


def _longest_s(one: Candidate, seconds: Durations) -> float:
    sides = np.array([seconds.forward_s, seconds.input_gradient_s, seconds.weight_gradient_s])
    return max(float(sides[:, list(own)].sum()) for own in _stages(one))
