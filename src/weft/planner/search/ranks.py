"""One plan stage by stage: seconds of each pipeline stage, its schedule with durations, bytes of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.config.partitioning import divide_by_rank
from weft.config.pipeline_schedule import Schedule, build_schedule, stages_of
from weft.errors import PlanError, Problem
from weft.planner.cost.layer import LayerCosts
from weft.planner.cost.memory import rank_bytes
from weft.planner.cost.memory_terms import layer_bytes
from weft.planner.cost.pipeline import Durations
from weft.planner.estimator import costs_of_layer
from weft.planner.measured.profile_tables import HostTables
from weft.planner.search.candidate import Candidate
from weft.planner.space.columns import Columns


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one microbatch in one layer, in the embedding, or in the head."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    @property
    def pass_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one microbatch in a layer, in the embedding, in head and loss."""

    layer: PassSeconds
    embedding: PassSeconds
    head: PassSeconds


def passes(one: Candidate) -> Passes:
    """Return the estimated seconds of a candidate's parts, including recompute and communication between ranks."""
    question = one.question
    columns = Columns.of([one.plan], question.job)
    costs = costs_of_layer(question.job, question.cluster, columns, question.tables)
    layer = _layer(one, costs)
    head = _first(costs.head_gemm) + _first(costs.head_memory) + _first(costs.head_tp)
    products = _first(costs.head_gemm) / 3
    embedding = _first(costs.embed) + _first(costs.embed_tp)
    return Passes(
        layer=layer,
        embedding=PassSeconds(embedding / 2, 0.0, embedding / 2),
        head=PassSeconds((head - products) / 2, (head - products) / 2, products),
    )


def _layer(one: Candidate, costs: LayerCosts) -> PassSeconds:
    forward, backward = (
        sum(_first(getattr(costs, f"{name}_{side}")) for name in ("gemm", "attn", "memory", "tp", "cp", "ep"))
        for side in "fb"
    )
    weights = 0.0 if one.plan.compile else min(_first(costs.wgrad), backward)
    layers = one.question.job.shape.layers / one.plan.pp
    each = one.plan.microbatches_per_step * layers
    return PassSeconds(
        forward + one.terms.get("host", 0.0) / each,
        backward - weights + one.terms.get("recompute", 0.0) / each,
        weights,
    )


def _first(values: object) -> float:
    return float(np.asarray(values)[0])


def stage_layers(one: Candidate) -> list[int]:
    """Return the layers of each stage of a candidate's pipeline, in order from the embedding.

    It is the plan's split, or the runtime's default, which depends on parameter counts only.
    """
    plan = one.plan
    return list(plan.split or one.question.job.shape.stage_layers(plan.pp * plan.virtual_stages))


def best_split(one: Candidate, parts: Passes) -> list[int]:
    """Compute the split with the shortest longest rank, by the estimated seconds."""
    plan = one.plan
    return divide_by_rank(
        one.question.job.shape.layers,
        [stages_of(plan.schedule, plan.pp, plan.virtual_stages, rank) for rank in range(plan.pp)],
        first=parts.embedding.pass_s / parts.layer.pass_s,
        last=parts.head.pass_s / parts.layer.pass_s,
    )


def durations(one: Candidate, layers: list[int], parts: Passes) -> Durations:
    """Return the seconds of every stage's passes, for the simulation."""

    def side(name: str) -> list[float]:
        seconds = [count * float(getattr(parts.layer, name)) for count in layers]
        seconds[0] += getattr(parts.embedding, name)
        seconds[-1] += getattr(parts.head, name)
        return seconds

    return Durations(
        forward_s=side("forward_s"),
        input_gradient_s=side("input_gradient_s"),
        weight_gradient_s=side("weight_gradient_s"),
    )


def schedule_of(one: Candidate, most_microbatches: int) -> Schedule:
    """Return the candidate's schedule, with a limited number of microbatches."""
    plan = one.plan
    count = min(plan.microbatches, max(most_microbatches, 2 * plan.pp))
    if count < plan.microbatches:
        count -= count % plan.pp
    return build_schedule(plan.schedule, plan.pp, count, plan.virtual_stages)


def memory_by_rank(one: Candidate) -> list[dict[str, float]]:
    """Return the bytes by class on every rank of the pipeline; one entry without a pipeline."""
    question, plan = one.question, one.plan
    if plan.pp == 1 or isinstance(question.tables, HostTables):
        return [dict(one.memory)] * plan.pp  # of a host the fullest rank's, for each
    columns = Columns.of([plan], question.job)
    layers = stage_layers(one)
    found: list[dict[str, float]] = []
    for rank in range(plan.pp):
        own = stages_of(plan.schedule, plan.pp, plan.virtual_stages, rank)
        held = np.array([float(sum(layers[stage] for stage in own))])
        place = (held, rank, 0 in own, len(layers) - 1 in own)
        if plan.recompute_blocks:
            columns = columns.with_arrays(recompute_share=np.minimum(1.0, plan.recompute_blocks / held))
        layer = layer_bytes(question.job, columns)
        device_bytes = question.cluster.device.memory_bytes
        classes = rank_bytes(question.job, columns, question.tables, layer, place, device_bytes)
        found.append({name: _first(value) for name, value in classes.items()})
    return found


def timed_schedule(one: Candidate, most_microbatches: int = 32) -> tuple[Schedule, Durations]:
    """Return the candidate's schedule with its seconds, for drawing.

    Raises:
        PlanError: if there is no pipeline.
    """
    if one.plan.pp == 1:
        rule = "the plan has no pipeline to draw. Add --fix pp=4, or leave --draw out."
        raise PlanError([Problem("pp", f"pp=1: {rule}")])
    parts = passes(one)
    return schedule_of(one, most_microbatches), durations(one, stage_layers(one), parts)
