"""From the best of the enumeration to better ones: descent and annealing over single changes in the whole space.

The enumeration may have left values out, and takes only round shares; from its best plans every single change is
tried, shares and budgets in small steps among them, as long as that helps. With time given, annealing goes on from
there: of a plan's neighbours one is drawn with a chance that falls with its step time, at a temperature that falls
from 2 % to 0.05 % of the best step (heat bath; Jia et al. 2018, arXiv 1807.05358, search so for operators).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence

from weft.planner.search.candidate import Candidate
from weft.planner.search.moves import estimated, neighbours
from weft.planner.search.question import Question
from weft.spec.plan import Plan

#: Plans from which the descent starts, and how often each may move.
_STARTS, _ROUNDS = 6, 8
_CHAINS = 4
_HOT, _COLD = 0.02, 0.0005
#: A change that gains less than this is not worth words in the plan.
_WORTH = 0.001


def descend(starts: Iterable[Candidate], question: Question) -> list[Candidate]:
    """The plans that are reached from the starts by taking the best single change until none helps."""
    found: dict[Plan, Candidate] = {}
    active = [one for one, _ in zip(starts, range(_STARTS), strict=False)]
    for _ in range(_ROUNDS):
        if not active:
            break
        moved: list[Candidate] = []
        for one, around in zip(active, _around(active, question), strict=True):
            better = [near for near in around if near.step_s < one.step_s * (1 - _WORTH)]
            if better:
                moved.append(min(better, key=lambda near: near.step_s))
        active = [one for one in moved if one.plan not in found]
        found |= {one.plan: one for one in active}
    return list(found.values())


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
            met |= {one.plan: one for one in around if one.step_s < best.step_s * (1 + _HOT)}
            fresh = [one for one in around if one.plan not in visited]
            chains[index] = _drawn(fresh, temperature, draw) if fresh else best
            visited.add(chains[index].plan)
            best = min((best, chains[index]), key=lambda one: one.step_s)
    return sorted(met.values(), key=lambda one: one.step_s)[:64]


def _around(centres: Sequence[Candidate], question: Question) -> list[list[Candidate]]:
    """The neighbours that fit, of each plan; all are estimated in one go."""
    plans = [list(neighbours(one.plan, question, fine=True)) for one in centres]
    every = estimated([plan for each in plans for plan in each], question)
    found: list[list[Candidate]] = []
    place = 0
    for each in plans:
        found.append([one for one in every[place : place + len(each)] if one.fits >= question.fits])
        place += len(each)
    return found


def _drawn(around: Sequence[Candidate], temperature: float, draw: random.Random) -> Candidate:
    """One of the plans: the faster, the likelier."""
    least = min(one.step_s for one in around)
    weights = [math.exp(-min(700.0, (one.step_s - least) / temperature)) for one in around]
    return draw.choices(around, weights)[0]
