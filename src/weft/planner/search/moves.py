"""One step from a plan to its neighbours in the space: what why-not proposes and what annealing tries."""

from __future__ import annotations

import itertools
import operator
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from weft.errors import PlanError
from weft.planner.estimator import estimate
from weft.planner.search.candidate import Candidate, candidates
from weft.planner.search.question import Question
from weft.planner.space import PRECISIONS, Columns, Job, Space, plan_space
from weft.spec import common_divisors, shares
from weft.spec.plan import AXES, PLAN_FIELDS, Plan

#: Fields that give memory back for time.
_ROOM = ("recompute", "offload")
_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")


def neighbours(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Plan]:
    """Yield the legal plans that are one change away, each once; decided fields stay as they are.

    Args:
        plan: where the search stands.
        question: what is asked.
        fine: in small steps.
    """
    space = Space.whole(question.job, question.cluster, question.fixed)
    yield from _legal(plan, _changes(plan, space, question, fine), question)


def with_room(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Plan]:
    """Yield the legal plans that differ in what gives memory back for time: in all of it together.

    Args:
        plan: where the search stands.
        question: what is asked.
        fine: in small steps.
    """
    space = Space.whole(question.job, question.cluster, question.fixed)
    facts = plan_space.search_facts(question.job, question.cluster)
    each: list[list[dict[str, Any]]] = []
    for name in _ROOM:
        nearby = PLAN_FIELDS[name].nearby
        values = [plan_space.as_values(name, one) for one in (*space.choices[name], plan_space.default_choice(name))]
        each.append([*values, *({name: value} for value in (nearby(plan, facts, fine) if nearby else ()))])
    yield from _legal(plan, (dict(ChainMap(*both)) for both in itertools.product(*each)), question)


def _legal(plan: Plan, changes: Iterable[dict[str, Any]], question: Question) -> Iterator[Plan]:
    seen = {plan, _fitted(plan, {}, question.job)}
    is_legal = question.verdicts.near(plan)
    for change in changes:
        if all(getattr(plan, name) == value for name, value in change.items()):
            continue
        try:
            found = _fitted(plan, change, question.job)
        except PlanError:
            continue
        if found not in seen and _keeps(found, question.fixed):
            seen.add(found)
            if is_legal(found):
                yield found


def _keeps(plan: Plan, fixed: Mapping[str, Any]) -> bool:
    """Whether every decided field has its value."""
    return all(getattr(plan, name) == value or _is_idle(name, plan) for name, value in fixed.items())


def _is_idle(name: str, plan: Plan) -> bool:
    """Whether a field that may be left open says nothing, as a way of context parallelism without any."""
    known = PLAN_FIELDS[name]
    return bool(known.open_word) and all(getattr(plan, axis) == 1 for axis in known.needs)


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
        yield _passes(plan, passes)


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
    return _passes(plan.replace(pp=moved["pp"]), sequences // fits[-1])


def _passes(plan: Plan, count: int) -> dict[str, Any]:
    return {"microbatches": count, "accumulation": 1} if plan.pp > 1 else {"microbatches": 1, "accumulation": count}


def _primes(number: int) -> list[int]:
    return [each for each in common_divisors(number) if each > 1 and all(each % low for low in range(2, each))]


_all_values = operator.attrgetter(*PLAN_FIELDS)
#: Fields that need axes, with those.
_NEEDS = tuple((name, frozenset(known.needs), known.default) for name, known in PLAN_FIELDS.items() if known.needs)


def _fitted(plan: Plan, change: dict[str, Any], job: Job) -> Plan:
    """The plan with the change; what belongs to an axis that is not in use goes back to its default."""
    before = _all_values(plan)
    found = dict(zip(PLAN_FIELDS, before, strict=True)) | change
    unused = {axis for axis in AXES if found[axis] == 1}
    for name, needs, default in _NEEDS:
        if needs <= unused:
            found[name] = default
    if found["schedule"] in _ONE_STAGE:
        found["virtual_stages"] = 1
    if found["dp_shard"] > 1 and found["ep"] == 1:
        found["zero"] = max(1, found["zero"])
    if found["zero"] != 3:
        found["reshard"] = PLAN_FIELDS["reshard"].default
    in_use = tuple(axis for axis in AXES if found[axis] > 1)
    if found["order"] == in_use or set(found["order"]) != set(in_use) or found["ep"] > 1:
        found["order"] = ()
    changed = {name: value for (name, value), old in zip(found.items(), before, strict=True) if value is not old}
    return job.settled(plan.replace(**changed))


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
    found = estimate(question.job, question.cluster, columns, question.tables)
    return [replace(one, products=products) for one in candidates(question, columns, found, listed)]


def changed_words(before: Plan, after: Plan) -> str:
    """Return what differs, as it is typed: "tp=4 accumulation=8"."""
    changed = [
        (name, known) for name, known in PLAN_FIELDS.items()
        if getattr(after, name) != getattr(before, name) and not _is_idle(name, after)
    ]  # fmt: skip
    return " ".join(f"{name}={known.kind.write(getattr(after, name))}" for name, known in changed)
