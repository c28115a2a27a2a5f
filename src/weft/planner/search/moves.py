"""One step from a plan to its neighbours in the space: what why-not proposes and what annealing tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.errors import PlanError
from weft.planner.estimator import Estimates, estimate
from weft.planner.search.candidate import Candidate, Estimated, candidates
from weft.planner.search.plan_rows import PLACES, Row, fitted, plan_of, row_of, values_by_field
from weft.planner.search.question import Question
from weft.planner.space import PRECISIONS, Columns, Space, plan_space
from weft.spec import common_divisors, shares
from weft.spec.plan import AXES, PLAN_FIELDS, Plan

#: Fields that give memory back for time.
ROOM = ("recompute", "offload")


def neighbours(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Plan]:
    """Yield the legal plans that are one change away, each once; decided fields stay as they are.

    Args:
        plan: where the search stands.
        question: what is asked.
        fine: in small steps.
    """
    yield from map(plan_of, near_rows(plan, question, fine=fine))


def near_rows(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Row]:
    """Yield the same as rows of values."""
    yield from _legal(plan, _changes(plan, question.space, question, fine), question)


def with_room(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Row]:
    """Yield the legal plans that differ in what gives memory back for time, in all of it together, as rows of values.

    Args:
        plan: where the search stands.
        question: what is asked.
        fine: in small steps.
    """
    facts = plan_space.search_facts(question.job, question.cluster)
    each: list[list[dict[str, Any]]] = []
    for name in ROOM:
        nearby, choices = PLAN_FIELDS[name].nearby, question.space.choices[name]
        values = [plan_space.as_values(name, one) for one in (*choices, plan_space.default_choice(name))]
        each.append([*values, *({name: value} for value in (nearby(plan, facts, fine) if nearby else ()))])
    yield from _legal(plan, ({**one, **other} for one, other in itertools.product(*each)), question)


def _legal(plan: Plan, changes: Iterable[dict[str, Any]], question: Question) -> Iterator[Row]:
    row, job = row_of(plan), question.job
    before = dict(zip(PLAN_FIELDS, row, strict=True))
    seen = {row, fitted(before, {}, job)}
    is_legal = question.verdicts.near(row)
    for change in changes:
        if all(before[name] == value for name, value in change.items()):
            continue
        try:
            found = fitted(before, change, job)
        except PlanError:
            continue
        if found not in seen and _keeps(found, question.fixed):
            seen.add(found)
            if is_legal(found):
                yield found


def _keeps(row: Row, fixed: Mapping[str, Any]) -> bool:
    """Whether every decided field has its value."""
    return all(row[PLACES[name]] == value or _is_idle(name, row) for name, value in fixed.items())


def _is_idle(name: str, row: Row) -> bool:
    """Whether a field that may be left open says nothing, as a way of context parallelism without any."""
    known = PLAN_FIELDS[name]
    return bool(known.open_word) and all(row[PLACES[axis]] == 1 for axis in known.needs)


def _changes(plan: Plan, space: Space, question: Question, fine: bool) -> Iterator[dict[str, Any]]:
    facts = plan_space.search_facts(question.job, question.cluster)
    for name, known in PLAN_FIELDS.items():
        if known.needs and all(getattr(plan, axis) == 1 for axis in known.needs):
            continue  # it has its default
        for chosen in (*space.choices[name], plan_space.default_choice(name)) if known.searched else ():
            yield plan_space.as_values(name, chosen)
        for value in known.nearby(plan, facts, fine) if known.nearby else ():
            yield {name: value}
    yield from _batches(plan, question, 4 if fine else 2)
    yield from _meshes(plan, question)


def _batches(plan: Plan, question: Question, most: int) -> Iterator[dict[str, Any]]:
    """Other numbers of passes: the next ones up and down."""
    legal = shares.even_passes(question.job.global_batch, plan.dp_size)
    now = plan.microbatches_per_step
    for passes in [*[each for each in legal if each < now][-most:], *[each for each in legal if each > now][:most]]:
        yield _passes(plan.pp, passes)


def _meshes(plan: Plan, question: Question) -> Iterator[dict[str, Any]]:
    """A prime factor of one axis goes to another; sequences in a pass stay as many as they can."""
    sizes = plan.axis_sizes()
    for source in AXES:
        for factor in _primes(sizes[source]):
            for target in AXES:
                if target == source:
                    continue
                moved = sizes | {source: sizes[source] // factor, target: sizes[target] * factor}
                yield moved | _kept_microbatch(plan, moved, question)
    for experts in common_divisors(question.job.shape.num_experts) if question.job.shape.num_experts else ():
        yield {"ep": experts}


def _kept_microbatch(plan: Plan, moved: Mapping[str, int], question: Question) -> dict[str, Any]:
    batch, data = question.job.global_batch, moved["dp_replicate"] * moved["dp_shard"]
    sequences = max(1, batch // data)
    wanted = max(1, shares.samples_per_microbatch(batch, plan.dp_size, plan.microbatches_per_step))
    fits = [each for each in common_divisors(sequences) if each <= wanted]
    return _passes(moved["pp"], sequences // fits[-1])


def _passes(pp: int, count: int) -> dict[str, Any]:
    return {"microbatches": count, "accumulation": 1} if pp > 1 else {"microbatches": 1, "accumulation": count}


def _primes(number: int) -> list[int]:
    return [each for each in common_divisors(number) if each > 1 and all(each % low for low in range(2, each))]


def estimated(plans: Iterable[Plan], question: Question, products: str = "") -> list[Candidate]:
    """Return the plans with their estimates, in their order; each says its way of context parallelism.

    Args:
        plans: legal ones.
        question: what is asked.
        products: fp8 or fp4, as if the plans multiplied in it; what else they do stays as it is. No software of Weft's
            multiplies in fp4: then as Megatron does.
    """
    listed = [question.job.settled(plan) for plan in plans]
    if not listed:
        return []
    columns = Columns.of(listed, question.job)
    if products:
        codes = np.full_like(columns.precision, PRECISIONS.index(products))
        columns = Columns(vars(columns) | {"precision": codes})
        stack = question.job.stack if products == "fp8" else replace(question.job.stack, fp8_inputs=True)
        question = replace(question, job=replace(question.job, stack=stack))
    found = candidates(question, columns, _estimate(question, columns), listed)
    return [replace(one, products=products) for one in found] if products else found


def estimated_rows(rows: Sequence[Row], question: Question) -> Estimated:
    """Return the estimates of plans that are settled, as rows of values; at least one."""
    columns = Columns.of_values(values_by_field(rows), question.job)
    return Estimated(question, columns, _estimate(question, columns))


def _estimate(question: Question, columns: Columns) -> Estimates:
    return estimate(question.job, question.cluster, columns, question.tables)


def changed_words(before: Plan, after: Plan) -> str:
    """Return what differs, as it is typed: "tp=4 accumulation=8"."""
    changed = [
        (name, known) for name, known in PLAN_FIELDS.items()
        if getattr(after, name) != getattr(before, name) and not _is_idle(name, row_of(after))
    ]  # fmt: skip
    return " ".join(f"{name}={known.kind.write(getattr(after, name))}" for name, known in changed)
