"""Answers as plain tables for JSON, with the printed values in base units."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from weft.planner.mixed.answer import MixedAnswer
from weft.planner.report.explanation import band_of, context, time_by_rung
from weft.planner.report.scenario import Scenario
from weft.planner.report.verdict import Comparison, WhyNot
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.question import Question
from weft.planner.space.enumerate import Refused
from weft.planner.uncertainty import unmeasured


def question_table(question: Question) -> dict[str, Any]:
    """Return the query as a table."""
    return {
        "model": question.model.name,
        "num_params": question.job.shape.num_params,
        "cluster": str(question.cluster),
        "num_devices": question.cluster.num_devices,
        "seq_len": question.job.seq_len,
        "global_batch": question.job.global_batch,
        "assumed": list(question.assumed),
        "fixed": {name: [*value] if isinstance(value, tuple) else value for name, value in question.fixed.items()},
        "built_only": question.built_only,
        "tier": question.tier,
        "fits_from": question.fits,
    }


def candidate_table(one: Candidate, hour_price: float | None = None) -> dict[str, Any]:
    """Return a table of one plan and its values: seconds, bytes, dollars and kWh of one step."""
    cost = one.cost(hour_price)
    shares = time_by_rung(one.terms, one.question.tables, one.question.cluster)
    missing = unmeasured(context(one), one.question.cluster.device.name)
    band = None if missing else band_of(one)
    return {
        "plan": str(one.plan),
        "built": one.built,
        "microbatch": one.microbatch,
        "step_s": one.step_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "mfu_causal": one.causal_mfu,
        "terms_s": dict(one.terms),
        "time_by_rung": shares,
        "step_s_band": None if band is None else [one.step_s * band.low, one.step_s * band.high],
        "step_s_band_level": None if band is None else band.level,
        "never_measured": list(missing),
        "clocked": one.clocked,
        "memory_bytes": dict(one.memory),
        "allocated_bytes": one.allocated_bytes,
        "reserved_bytes": one.reserved_bytes,
        "total_bytes": one.total_bytes,
        "usable_bytes": one.usable_bytes,
        "fits_probability": one.fits,
        "step_price_dollars": cost.price,
        "step_energy_kwh": cost.energy_kwh,
    }


def answer_table(found: Answer[Candidate], limit: int, hour_price: float | None = None) -> dict[str, Any]:
    """Return a table of the ranked plans, the Pareto front of memory and speed, and the reasons against other plans."""
    return {
        "question": question_table(found.question),
        "num_plans": found.num_plans,
        "num_estimated": found.num_estimated,
        "num_fit": found.num_fit,
        "left_out": list(found.left_out),
        "seconds": found.seconds,
        "plans": [candidate_table(one, hour_price) for one in found.layouts(limit)],
        "pareto": [candidate_table(one, hour_price) for one in found.pareto],
        "refused": refused_table(found.refused),
        "nearest": None if found.nearest is None else candidate_table(found.nearest, hour_price),
    }


def refused_table(refused: Iterable[Refused]) -> list[dict[str, Any]]:
    """Return a table of the reasons against plans."""
    return [
        {"reason": each.name, "count": each.count, "example": str(each.example), "message": each.message}
        for each in refused
    ]


def why_not_table(found: WhyNot) -> dict[str, Any]:
    """Return the verdict on a plan as a table."""
    return {
        "plan": str(found.plan),
        "kind": found.kind,
        "sentence": found.sentence,
        "violations": [{"rule": each.rule, "field": each.field, "message": each.message} for each in found.violations],
        "candidate": None if found.candidate is None else candidate_table(found.candidate),
        "remedies": [{"change": each.words, **candidate_table(each.after)} for each in found.remedies],
        "best": None if found.best is None else candidate_table(found.best),
    }


def comparison_table(found: Comparison) -> dict[str, Any]:
    """Return a table of two plans and their differences."""
    return {
        "a": candidate_table(found.left),
        "b": candidate_table(found.right),
        "time": [{"term": name, "a_s": a, "b_s": b} for name, a, b in found.time_rows],
        "memory": [{"class": name, "a_bytes": a, "b_bytes": b} for name, a, b in found.memory_rows],
    }


def mixed_table(found: MixedAnswer) -> dict[str, Any]:
    """Return the plan of a mixed cluster, and the roles of kinds that are too slow, as JSON values."""
    best = found.best
    table: dict[str, Any] = {"roles": [dataclasses.asdict(role) for role in found.roles]}
    if best is not None:
        placement = [{"device": name, "ranks": count} for name, count in best.placement]
        table |= {"plan": str(best.plan), "step_s": best.step_s, "even_s": best.even_s, "placement": placement,
                  "exact": best.is_exact}  # fmt: skip
    return table


def scenario_table(found: Scenario) -> dict[str, Any]:
    """Return a table with a changed query and its best plan."""
    best = found.answer.best
    return {
        "what_if": found.text,
        "question": question_table(found.question),
        "num_fit": found.answer.num_fit,
        "best": None if best is None else candidate_table(best),
    }
