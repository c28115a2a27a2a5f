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
from weft.planner.estimator import Estimates, costs_of_layer, estimate
from weft.planner.search.candidate import Candidate, candidates
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


def _by_rank(one: Candidate) -> list[Candidate]:
    """Return the candidate for each rank of the pipeline, with the recompute and offload of that rank."""
    plans = [one.plan.on_stage(rank) for rank in range(one.plan.pp)]
    if not one.plan.differs_by_stage:
        return [one] * len(plans)
    columns = Columns.of(plans, one.question.job)
    found = estimate(one.question.job, one.question.cluster, columns, one.question.tables)
    return candidates(one.question, columns, found, plans)


def _stage_passes(one: Candidate, ranks: list[Candidate]) -> list[Passes]:
    """Return the passes of each stage. ranks: the candidate for each rank of the pipeline."""
    if not one.plan.differs_by_stage:
        return [passes(one)] * (one.plan.pp * one.plan.virtual_stages)
    own = [passes(each) for each in ranks]
    rank_of = {stage: rank for rank, stages in enumerate(_stages(one)) for stage in stages}
    return [own[rank_of[stage]] for stage in range(len(rank_of))]


def _durations(layers: list[int], parts: list[Passes]) -> Durations:
    sides = np.stack([np.multiply(each.layer, count) for each, count in zip(parts, layers, strict=True)], axis=1)
    sides[:, 0] += parts[0].embedding
    sides[:, -1] += parts[-1].head
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
    layers = stage_layers(one)
    found: list[dict[str, float]] = []
    for rank, own in enumerate(_stages(one)):
        held = np.array([float(sum(layers[stage] for stage in own))])
        place = (held, rank, 0 in own, len(layers) - 1 in own)
        plan = one.plan.on_stage(rank)
        columns = Columns.of([plan], question.job)
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
    return _schedule(one, most_microbatches), _durations(stage_layers(one), _stage_passes(one, _by_rank(one)))


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
    ranks, usual = _by_rank(one), stage_layers(one)
    parts = _stage_passes(one, ranks)
    try:
        plain = _timed(one, parts, usual, ranks)
    except (PlanError, ValueError):
        return one
    if one.plan.split or "split" in one.question.fixed or one.plan.differs_by_stage:
        return plain
    layers = best_split(one, parts[0])
    if _longest_s(one, _durations(layers, parts)) > (1 - _WORTH) * _longest_s(one, _durations(usual, parts)):
        return plain
    even = _timed(replace(one, plan=one.plan.replace(split=tuple(layers))), parts, layers, ranks)
    return even if even.step_s < plain.step_s * (1 - _WORTH) and even.fits >= one.question.fits else plain


def _timed(one: Candidate, parts: list[Passes], layers: list[int], ranks: list[Candidate]) -> Candidate:
    seconds, schedule = _durations(layers, parts), _schedule(one, 2 * one.plan.pp)
    busy = _rank_seconds(one, seconds)
    longest = max(busy)
    work = one.plan.microbatches * longest
    makespan = makespan_s(schedule, seconds) + (one.plan.microbatches - schedule.num_microbatches) * longest
    slowest = ranks[busy.index(longest)].terms
    before = sum(slowest[name] for name in _WORK)
    terms = {
        name: value * (work / before) if name in _WORK else max(each.terms[name] for each in ranks)
        for name, value in slowest.items()
    }
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


def _rank_seconds(one: Candidate, seconds: Durations) -> list[float]:
    """Return the time (s) of one microbatch on each rank."""
    sides = np.array([seconds.forward_s, seconds.input_gradient_s, seconds.weight_gradient_s])
    return [float(sides[:, list(own)].sum()) for own in _stages(one)]


def _longest_s(one: Candidate, seconds: Durations) -> float:
    return max(_rank_seconds(one, seconds))
