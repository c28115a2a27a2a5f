"""Neighbors of a plan in the search space, and descent and annealing over them."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.config import partitioning as shares
from weft.config.fields.layout import common_divisors
from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.errors import PlanError
from weft.planner.estimator import Estimates, estimate
from weft.planner.search.candidate import Candidate, Estimated, candidates
from weft.planner.search.pipeline_clock import clocked
from weft.planner.search.plan_rows import PLACES, Row, differing, fitted, row_of, values_by_field
from weft.planner.search.question import Question
from weft.planner.space import enumerate as plan_space
from weft.planner.space.columns import PRECISIONS, Columns

#: Fields that trade time for memory.
ROOM = ("recompute", "offload")


def neighbours(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Plan]:
    """Yield the legal plans that differ in one change, without duplicates. Fixed fields stay unchanged.

    Args:
        fine: True for smaller and more changes of numbers.
    """
    yield from map(Plan.of_normal, near_rows(plan, question, fine=fine))


def near_rows(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Row]:
    """Yield the plans of `neighbours` as rows of values."""
    yield from _legal(plan, _changes(plan, question, fine), question)


def with_room(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Row]:
    """Yield the legal plans with all combinations of the fields that trade time for memory, as rows of values."""
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
        if found not in seen and all(
            found[PLACES[name]] == value or _is_idle(name, found) for name, value in question.fixed.items()
        ):
            seen.add(found)
            if is_legal(found):
                yield found


def _is_idle(name: str, row: Row) -> bool:
    known = PLAN_FIELDS[name]
    return bool(known.auto_value) and all(row[PLACES[axis]] == 1 for axis in known.needs)


def _changes(plan: Plan, question: Question, fine: bool) -> Iterator[dict[str, Any]]:
    facts = plan_space.search_facts(question.job, question.cluster)
    for name, known in PLAN_FIELDS.items():
        if known.needs and all(getattr(plan, axis) == 1 for axis in known.needs):
            continue  # it keeps its default
        for chosen in (*question.space.choices[name], plan_space.default_choice(name)) if known.searched else ():
            yield plan_space.as_values(name, chosen)
        for value in known.nearby(plan, facts, fine) if known.nearby else ():
            yield {name: value}
    legal, most = shares.even_passes(question.job.global_batch, plan.dp_size), 4 if fine else 2
    now = plan.microbatches_per_step
    for passes in [*[each for each in legal if each < now][-most:], *[each for each in legal if each > now][:most]]:
        yield _passes(plan.pp, passes)
    yield from _meshes(plan, question)


def _meshes(plan: Plan, question: Question) -> Iterator[dict[str, Any]]:
    """Yield meshes with a prime factor moved from one axis to another, and values of ep.

    The microbatch size is kept if possible.
    """
    sizes, batch = plan.axis_sizes(), question.job.global_batch
    wanted = max(1, shares.samples_per_microbatch(batch, plan.dp_size, plan.microbatches_per_step))
    for source in AXES:
        divisors = common_divisors(sizes[source])
        for factor in (each for each in divisors if each > 1 and all(each % low for low in range(2, each))):  # primes
            for target in AXES:
                if target == source:
                    continue
                moved = sizes | {source: sizes[source] // factor, target: sizes[target] * factor}
                sequences = max(1, batch // (moved["dp_replicate"] * moved["dp_shard"]))
                fits = [each for each in common_divisors(sequences) if each <= wanted]
                yield moved | _passes(moved["pp"], sequences // fits[-1])
    for experts in common_divisors(question.job.shape.num_experts) if question.job.shape.num_experts else ():
        yield {"ep": experts}


def _passes(pp: int, count: int) -> dict[str, Any]:
    return {"microbatches": count, "accumulation": 1} if pp > 1 else {"microbatches": 1, "accumulation": count}


def estimated(plans: Iterable[Plan], question: Question, products: str = "") -> list[Candidate]:
    """Return plans with their estimates, in order, without checking rules. `cp_mode` "auto" is resolved.

    Args:
        products: "fp8" or "fp4" to estimate all matmuls in this format, with everything else unchanged. Weft has no fp4
            matmuls; they are estimated as in Megatron.
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
    # Columns have the recompute and offload of one rank. Other ranks are in the simulation.
    found = [clocked(one) if one.plan.differs_by_stage else one for one in found]
    return [replace(one, products=products) for one in found] if products else found


def _estimate(question: Question, columns: Columns) -> Estimates:
    return estimate(question.job, question.cluster, columns, question.tables)


def changed_words(before: Plan, after: Plan) -> str:
    """Return the fields of `after` that differ, as plan text such as "tp=4 accumulation=8"."""
    changed = [
        (name, known) for name, known in PLAN_FIELDS.items()
        if getattr(after, name) != getattr(before, name) and not _is_idle(name, row_of(after))
    ]  # fmt: skip
    return " ".join(f"{name}={known.kind.write(getattr(after, name))}" for name, known in changed)


# Improvement of the best enumerated plans: descent and annealing over single changes in the full space.

#: Maximum number of moves of each plan in the descent.
_ROUNDS = 10
#: Neighbors that might be faster with other recompute and offload settings: number per plan, number of additional kinds
#: of change, and number of plans.
_TEMPTING, _OF_KINDS, _ROOMY = 4, 8, 2
#: At the end of the descent, the best plan of some layouts is tried with all steps of recompute and offload: number of
#: layouts, and number of layouts without a pipeline, which offloading helps most. The third is the number of plans that
#: are ranked by their time without recompute and offload.
_FINE, _WHOLE, _BARE = 4, 3, 5
_CHAINS = 4
_HOT, _COLD = 0.02, 0.0005
#: A change that makes the plan text longer must reduce the time to below this share.
_WORTH = 1 - 0.001


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Neighbor of a plan: values of its fields, time (s) that it is ranked by, and probability that memory suffices.

    Attributes:
        place: index among the rows that were estimated together.
    """

    row: Row
    rank_s: float
    fits: float
    place: int
    found: Estimated

    def candidate(self) -> Candidate:
        """Return the neighbor as a candidate with its full estimate."""
        return self.found.candidate(self.place, Plan.of_normal(self.row))


def descend(starts: Sequence[Candidate], question: Question, count: int) -> list[Candidate]:
    """Return the plans reached from the first `count` starts by repeated best moves, until no move helps.

    A move is one change, alone or together with a change of recompute or offload, which trade time for memory. Each
    start makes at most _ROUNDS moves.

    For the best plans of some layouts, and for plans that would be best without a memory limit, all combinations of
    recompute and offload are tried in small steps, also with the smallest microbatch, which needs the least memory. The
    descent continues from the faster plans found.
    """
    found = _descent(starts[:count], question)
    layouts: dict[tuple[int, int, int], Candidate] = {}
    for one in sorted((*starts, *found), key=_rank_s):
        layouts.setdefault((one.plan.pp, one.plan.tp, one.plan.cp), one)
    whole = [one for one in layouts.values() if one.plan.pp == 1]
    best = [*list(layouts.values())[:_FINE], *whole[:_WHOLE]]
    bare = [(one, plan) for one in whole for plan in _by_microbatch(one)]
    times = _estimated([[_without_room(row_of(plan)) for _, plan in bare]], question)[0]
    fastest = [bare[each.place] for each in sorted(times, key=_rank_s)[:_BARE]]
    roots = {plan: one for one, plan in [*((one, plan) for one in best for plan in _by_microbatch(one)), *fastest]}
    nearby = _estimated([list(with_room(plan, question, fine=True)) for plan in roots], question)
    better = [
        gain for one, finer in zip(roots.values(), nearby, strict=True) for gain in _best_gain(one, finer, question)
    ]
    return [*found, *better, *_descent(sorted(better, key=_rank_s), question)] if better else found


def _rank_s(one: Candidate | Neighbour) -> float:
    return one.rank_s


def _best_gain(one: Candidate, near: Iterable[Neighbour], question: Question) -> list[Candidate]:
    better = [each for each in near if each.rank_s < one.rank_s * _WORTH and each.fits >= question.fits]
    return [min(better, key=_rank_s).candidate()] if better else []


def _by_microbatch(one: Candidate) -> list[Plan]:
    if one.microbatch == 1:
        return [one.plan]
    name = "microbatches" if one.plan.pp > 1 else "accumulation"
    return [one.plan, one.plan.replace(**{name: getattr(one.plan, name) * one.microbatch})]


def _descent(starts: Iterable[Candidate], question: Question) -> list[Candidate]:
    tried: set[Row] = set()
    found: dict[Plan, Candidate] = {}
    active = list(starts)
    for _ in range(_ROUNDS):
        if not active:
            break
        every = _around(active, question)
        roomy = _with_room(active, every, question, tried)
        moved = [
            gain
            for one, around, more in zip(active, every, roomy, strict=True)
            for gain in _best_gain(one, (*around, *more), question)
        ]
        active = list({one.plan: one for one in moved if one.plan not in found}.values())
        found |= {one.plan: one for one in active}
    return list(found.values())


def _with_room(
    centres: Sequence[Candidate], around: Sequence[Sequence[Neighbour]], question: Question, tried: set[Row]
) -> list[list[Neighbour]]:
    """Return, for each of `centres`, neighbors with an additional change of recompute or offload.

    Only the fastest plans have such neighbors; the lists of others are empty. The change is applied, in coarse steps,
    to the neighbors that would gain most without a memory limit. They are added to `tried`, and neighbors that are in
    it already are not used again.
    """
    fastest = sorted(centres, key=_rank_s)[:_ROOMY]
    listed: list[list[Row]] = []
    bare: list[list[Row]] = []
    for one, near in zip(centres, around, strict=True):
        own = row_of(one.plan)
        rows = [each.row for each in near if differing(own, each.row).isdisjoint(ROOM)] if one in fastest else []
        bare.append(list(dict.fromkeys(map(_without_room, rows))))
    for one, each_bare in zip(centres, _estimated(bare, question), strict=True):
        centre = row_of(one.plan)
        best = sorted(each_bare, key=_rank_s)
        tempting = [each.row for each in best if each.rank_s < one.rank_s * _WORTH and each.row not in tried]
        kinds: dict[tuple[object, ...], Row] = {}
        for row in tempting:
            passes = row[PLACES["microbatches" if row[PLACES["pp"]] > 1 else "accumulation"]]
            kinds.setdefault((differing(centre, row).difference(ROOM), passes), row)
        chosen = list(dict.fromkeys([*tempting[:_TEMPTING], *list(kinds.values())[:_OF_KINDS]]))
        tried.update(chosen)
        listed.append([row for root in chosen for row in with_room(Plan.of_normal(root), question)])
    return _estimated(listed, question)


def _without_room(row: Row) -> Row:
    found = list(row)
    for name in ROOM:
        found[PLACES[name]] = PLAN_FIELDS[name].default
    return tuple(found)


def anneal(starts: Sequence[Candidate], question: Question, seconds: float, seed: int = 0) -> list[Candidate]:
    """Return up to 64 of the best plans that annealing finds within a time limit (s); empty if none of them fits."""
    if seconds <= 0 or not starts:
        return []
    draw = random.Random(seed)
    chains = list(starts[:_CHAINS])
    best = min(chains, key=_rank_s)
    met: dict[Row, Neighbour] = {}
    visited = {row_of(one.plan) for one in chains}
    begin = time.perf_counter()
    while (passed := (time.perf_counter() - begin) / seconds) < 1:
        temperature = best.rank_s * _HOT * (_COLD / _HOT) ** passed
        for index, around in enumerate(_around(chains, question)):
            fitting = [one for one in around if one.fits >= question.fits]
            met |= {one.row: one for one in fitting if one.rank_s < best.rank_s * (1 + _HOT)}
            fresh = [one for one in fitting if one.row not in visited]
            least = min((one.rank_s for one in fresh), default=0.0)
            weights = [math.exp(-min(700.0, (one.rank_s - least) / temperature)) for one in fresh]
            chains[index] = draw.choices(fresh, weights)[0].candidate() if fresh else best
            visited.add(row_of(chains[index].plan))
            best = min((best, chains[index]), key=_rank_s)
    return [one.candidate() for one in sorted(met.values(), key=_rank_s)[:64]]


def _around(centres: Sequence[Candidate], question: Question) -> list[list[Neighbour]]:
    return _estimated([list(near_rows(one.plan, question, fine=True)) for one in centres], question)


def _estimated(listed: Sequence[Sequence[Row]], question: Question) -> list[list[Neighbour]]:
    rows = [row for each in listed for row in each]
    if not rows:
        return [[] for _ in listed]
    columns = Columns.of_values(values_by_field(rows), question.job)
    found = Estimated(question, columns, _estimate(question, columns))
    every = iter([Neighbour(*each, found) for each in zip(rows, found.rank_s, found.fits, itertools.count())])
    return [[next(every) for _ in each] for each in listed]
