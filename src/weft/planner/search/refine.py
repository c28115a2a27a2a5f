"""From the best of the enumeration to better ones: descent and annealing over single changes in the whole space.

The enumeration may have left values out, and takes only round shares; from its best plans every single change is
tried, shares and budgets in small steps among them, as long as that helps; and what would be faster if memory were no
limit is tried with other recompute and offload. With time given, annealing goes on from there: of a plan's neighbours
one is drawn with a chance that falls with its step time, at a temperature that falls from 2 % to 0.05 % of the best
step (heat bath; Jia et al. 2018, arXiv 1807.05358, search so for operators).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence

from weft.planner.search.candidate import Candidate
from weft.planner.search.moves import estimated, neighbours, with_room
from weft.planner.search.question import Question
from weft.spec.plan import PLAN_FIELDS, Plan

#: Plans from which the descent starts, and how often each may move.
_STARTS, _ROUNDS = 10, 10
#: Neighbours that might be faster with other recompute and offload: how many of a plan, the best of how many kinds of
#: change besides, and of how many plans.
_TEMPTING, _OF_KINDS, _ROOMY = 4, 8, 2
_CHAINS = 4
_HOT, _COLD = 0.02, 0.0005
#: A change that gains less than this is not worth words in the plan.
_WORTH = 0.001


def descend(starts: Iterable[Candidate], question: Question) -> list[Candidate]:
    """The plans that are reached from the starts by taking the best change until none helps.

    A change is a single one, or one together with another recompute or offload, which give memory back for time. Of the
    best plan these are tried together in small steps, and the descent goes on from there.
    """
    starts = list(starts)
    found = _descent(starts, question)
    if starts:
        best = min((*starts, *found), key=lambda one: one.step_s)
        finer = estimated(with_room(best.plan, question, fine=True), question)
        better = [one for one in finer if _is_better(one, best) and one.fits >= question.fits]
        if better:
            first = min(better, key=lambda one: one.step_s)
            found += [first, *_descent([first], question)]
    return found


def _descent(starts: Iterable[Candidate], question: Question) -> list[Candidate]:
    tried: set[Plan] = set()
    found: dict[Plan, Candidate] = {}
    active = [one for one, _ in zip(starts, range(_STARTS), strict=False)]
    for _ in range(_ROUNDS):
        if not active:
            break
        moved: list[Candidate] = []
        every = _around(active, question)
        roomy = _with_room(active, every, question, tried)
        for one, around, more in zip(active, every, roomy, strict=True):
            better = [near for near in (*around, *more) if _is_better(near, one) and near.fits >= question.fits]
            if better:
                moved.append(min(better, key=lambda near: near.step_s))
        active = list({one.plan: one for one in moved if one.plan not in found}.values())
        found |= {one.plan: one for one in active}
    return list(found.values())


def _is_better(near: Candidate, one: Candidate) -> bool:
    return near.step_s < one.step_s * (1 - _WORTH)


def _with_room(
    centres: Sequence[Candidate], around: Sequence[Sequence[Candidate]], question: Question, tried: set[Plan]
) -> list[list[Candidate]]:
    """For the fastest plans, neighbours with a second change of recompute or offload.

    They are those that would gain most if memory were no limit, each taken once, with coarse steps of both.

    Args:
        centres: the plans.
        around: the neighbours of each.
        question: what is asked.
        tried: neighbours that were taken before; the new ones are added.
    """
    fastest = sorted(centres, key=lambda one: one.step_s)[:_ROOMY]
    listed: list[list[Plan]] = []
    for one, near in zip(centres, around, strict=True):
        plans = [each.plan for each in near if _room(each.plan) == _room(one.plan)] if one in fastest else []
        bare = dict.fromkeys(map(_without_room, plans))
        best = sorted(estimated(bare, question), key=lambda each: each.step_s)
        tempting = [each.plan for each in best if _is_better(each, one) and each.plan not in tried]
        kinds: dict[tuple[object, ...], Plan] = {}
        for plan in tempting:
            kinds.setdefault((*_changed(one.plan, plan), plan.microbatches_per_step), plan)
        chosen = list(dict.fromkeys([*tempting[:_TEMPTING], *list(kinds.values())[:_OF_KINDS]]))
        tried.update(chosen)
        listed.append([plan for root in chosen for plan in with_room(root, question)])
    return _estimated(listed, question)


def _changed(before: Plan, after: Plan) -> tuple[str, ...]:
    """The fields that differ, but for room."""
    names = (name for name in PLAN_FIELDS if name not in ("recompute", "offload"))
    return tuple(name for name in names if getattr(before, name) != getattr(after, name))


def _room(plan: Plan) -> tuple[object, ...]:
    return plan.recompute, plan.offload


def _without_room(plan: Plan) -> Plan:
    return plan.replace(recompute=PLAN_FIELDS["recompute"].default, offload=PLAN_FIELDS["offload"].default)


def anneal(starts: Sequence[Candidate], question: Question, seconds: float, seed: int = 0) -> list[Candidate]:
    """The best plans that annealing meets within a time; empty where it meets none that fits."""
    if seconds <= 0 or not starts:
        return []
    draw = random.Random(seed)
    chains = list(starts[:_CHAINS])
    best = min(chains, key=lambda one: one.step_s)
    met: dict[Plan, Candidate] = {}
    visited = {one.plan for one in chains}
    begin = time.perf_counter()
    while (passed := (time.perf_counter() - begin) / seconds) < 1:
        temperature = best.step_s * _HOT * (_COLD / _HOT) ** passed
        for index, around in enumerate(_around(chains, question)):
            fitting = [one for one in around if one.fits >= question.fits]
            met |= {one.plan: one for one in fitting if one.step_s < best.step_s * (1 + _HOT)}
            fresh = [one for one in fitting if one.plan not in visited]
            chains[index] = _drawn(fresh, temperature, draw) if fresh else best
            visited.add(chains[index].plan)
            best = min((best, chains[index]), key=lambda one: one.step_s)
    return sorted(met.values(), key=lambda one: one.step_s)[:64]


def _around(centres: Sequence[Candidate], question: Question) -> list[list[Candidate]]:
    """The neighbours of each plan; all are estimated in one go."""
    return _estimated([list(neighbours(one.plan, question, fine=True)) for one in centres], question)


def _estimated(listed: Sequence[Sequence[Plan]], question: Question) -> list[list[Candidate]]:
    every = iter(estimated([plan for each in listed for plan in each], question))
    return [[next(every) for _ in each] for each in listed]


def _drawn(around: Sequence[Candidate], temperature: float, draw: random.Random) -> Candidate:
    """One of the plans: the faster, the likelier."""
    least = min(one.step_s for one in around)
    weights = [math.exp(-min(700.0, (one.step_s - least) / temperature)) for one in around]
    return draw.choices(around, weights)[0]
