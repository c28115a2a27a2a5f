"""Search: enumerate the space, estimate all plans as numpy columns, keep the best, and refine them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import Plan
from weft.planner.cost.machine import Tables
from weft.planner.estimator import Estimates, estimate, estimate_memory, estimate_seconds
from weft.planner.search.candidate import Answer, Candidate, candidates, layouts, rank_seconds
from weft.planner.search.pipeline_clock import MOST_STEPS, clocked, num_steps
from weft.planner.search.question import Question
from weft.planner.search.refine import anneal, descend
from weft.planner.space.columns import Columns
from weft.planner.space.enumerate import PlanGrid, Refused, Space, Tally, enumerate_space
from weft.units import format_bytes

Floats = NDArray[np.float64]

#: Rows per estimation call.
_CHUNK = 2**17
#: Plans retained of each chunk: the fastest, and the fastest for each (tp, pp, cp).
_KEPT, _KEPT_OF_CELL = 256, 4
#: If a space exceeds the limit by this factor, the plans that its rules allow are not counted.
_COUNTED = 8
#: If a space exceeds the limit by this factor, it is narrowed by several steps. With more devices than this, a part of
#: the space is checked first.
_FAR, _MANY_DEVICES = 2 * _COUNTED, 64
#: Number of start plans for the descent: from the best cells (with few devices, with many), and from the best kinds.
_CELLS, _KINDS = (6, 10), 4
#: Number of layouts whose pipelines are simulated.
_CLOCKED = 12
#: A plan is simulated separately if its time is below this share of another plan's with the same pipeline.
_FASTER = 0.99


def answer(question: Question) -> Answer[Candidate]:
    """Find the best plans of a query. A search space of more than `question.limit` plans is narrowed first."""
    start = time.perf_counter()
    tally = Tally(question.facts)
    space, blocks = _space_in_bounds(question, tally)
    keep = _Keep(question, question.tables)
    for parts in _joint_parts(part for block in blocks for part in block.chunks(_CHUNK, tally, question.job)):
        keep.look_at(parts)
    ranked, pareto = keep.ranked()
    ranked = _refined(ranked, question)
    refused = [*tally.refused.values(), *keep.refused.values()]
    front = [*ranked, *pareto]
    sizes = [np.array([getattr(one, name) for one in front]) for name in ("total_bytes", "step_s")]
    return Answer(
        question=question,
        ranked=tuple(ranked),
        pareto=tuple(front[int(row)] for row in _border(*sizes)) if front else (),
        refused=tuple(sorted(refused, key=lambda each: -each.count)),
        num_plans=keep.num_plans + sum(each.count for each in tally.refused.values()),
        num_estimated=keep.num_plans,
        num_fit=keep.num_fit,
        left_out=space.left_out,
        nearest=keep.nearest,
        seconds=time.perf_counter() - start,
    )


def _joint_parts(parts: Iterable[Columns]) -> Iterator[list[Columns]]:
    found: list[Columns] = []
    for part in parts:
        if found and sum(map(len, found)) + len(part) > _CHUNK:
            yield found
            found = []
        found.append(part)
    if found:
        yield found


def _refined(ranked: list[Candidate], question: Question) -> list[Candidate]:
    if not ranked:
        return ranked
    cells: dict[tuple[int, int, int], Candidate] = {}
    for one in ranked:
        cells.setdefault((one.plan.pp, one.plan.tp, one.plan.cp), one)
    num_cells = _CELLS[question.cluster.num_devices > _MANY_DEVICES]
    kinds: dict[tuple[object, ...], Candidate] = {}  # some improve only by two changes together
    for one in ranked:
        kinds.setdefault((one.plan.compile, one.plan.schedule, one.plan.zero, one.plan.recompute), one)
    first = [*list(cells.values())[:num_cells], *list(kinds.values())[:_KINDS]]
    starts = list({one.plan: one for one in [*first, *cells.values(), *layouts(ranked)]}.values())
    found = descend(starts, question, num_cells + _KINDS)
    found += anneal([*found, *starts], question, question.refine_s)
    merged = {one.plan: one for one in [*ranked, *found]}
    return _with_clock(sorted(merged.values(), key=lambda one: one.rank_s), question)


def _with_clock(ranked: list[Candidate], question: Question) -> list[Candidate]:
    """Return the ranking after the pipelines of the top plan and of the best layouts are simulated.

    A closed form may be too optimistic for uneven stages. So if another plan is then on top, it is simulated too, up to
    a limit. Simulated plans that do not fit are dropped, and so are plans with a simulated pipeline that are hardly
    faster than the simulated plan.
    """
    left = MOST_STEPS * (1 + 4 * question.refine_s)
    timed: dict[Plan, Candidate] = {}
    slower: dict[tuple[object, ...], float] = {}
    order = _ranked(ranked)
    while order:
        first = (one for one in (order[0], *layouts(order)[:_CLOCKED]) if one.plan.pp > 1 and not one.clocked)
        due = next((one for one in first if one.plan not in timed), None)
        left -= num_steps(due) if due is not None else 0
        if due is None or left < 0:
            break
        found = timed[due.plan] = clocked(due)
        slower.setdefault(_pipeline(due.plan), due.step_s)
        others = (
            one
            for one in order
            if one.plan in timed or one.step_s < _FASTER * slower.get(_pipeline(one.plan), math.inf)
        )
        order = _ranked(found if one is due else one for one in others)
        order = [one for one in order if one.fits >= one.question.fits]
    return order


def _pipeline(plan: Plan) -> tuple[object, ...]:
    return (plan.pp, plan.tp, plan.cp, plan.ep, plan.schedule, plan.microbatches, plan.virtual_stages, plan.split)


def _ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the plans, fastest first. If times agree in four digits, plans with shorter text precede."""
    times = defaultdict[float, list[Candidate]](list)
    for one in found:
        times[float(f"{one.rank_s:.3e}")].append(one)
    order: list[Candidate] = []
    for _, alike in sorted(times.items()):
        texts = {id(one): str(one.plan) for one in alike} if len(alike) > 1 else {}
        order += sorted(alike, key=lambda one: (len(texts[id(one)].split()), texts[id(one)])) if texts else alike
    return order


def _space_in_bounds(question: Question, tally: Tally) -> tuple[Space, list[PlanGrid]]:
    space = question.space
    while True:
        tally.refused.clear()
        if question.cluster.num_devices >= _MANY_DEVICES and (part := space.of_last_meshes()) is not None:
            # The tables of this part are small, and narrower spaces reuse them.
            blocks = enumerate_space(part, question.job, question.cluster, question.pruning_rules, tally)
            tally.refused.clear()
            if sum(block.num_rows for block in blocks) > _FAR * question.limit:
                space = _narrower(space, 3)
                continue
        blocks = enumerate_space(space, question.job, question.cluster, question.pruning_rules, tally)
        smaller = space.narrower()
        rows = sum(block.num_rows for block in blocks)
        if question.limit < rows <= _COUNTED * question.limit:
            rows = sum(block.num_legal() for block in blocks)
        if rows <= question.limit or smaller is None:
            return space, blocks
        # If far over the limit, narrow by two more steps without counting between them.
        space = _narrower(space, 3 if rows > _FAR * question.limit else 1)


def _narrower(space: Space, steps: int) -> Space:
    for _ in range(steps):
        space = space.narrower() or space
    return space


@dataclass(slots=True)
class _Keep:
    """The best plans, and statistics of all estimated plans."""

    question: Question
    tables: Tables
    kept: list[Columns] = field(default_factory=list[Columns])
    refused: dict[str, Refused] = field(default_factory=dict[str, Refused])
    nearest_row: Columns | None = None
    least: float = math.inf
    num_plans: int = 0
    num_fit: int = 0

    def look_at(self, parts: Sequence[Columns]) -> None:
        """Estimate some plans, retain the best of them, and count those that do not fit."""
        asked, columns = self.question, Columns.concatenate(parts)
        found = estimate_memory(asked.job, asked.cluster, columns, self.tables)
        total = found.total_bytes
        fits = found.chance(total) >= asked.fits
        self.num_plans += len(columns)
        self.num_fit += int(fits.sum())
        out, stop = ~fits, 0
        for part in parts:  # one example of each part is kept
            start, stop = stop, stop + len(part)
            self._refuse(columns, found, total, start + np.flatnonzero(out[start:stop]))
        rows = np.flatnonzero(fits)
        if not len(rows):
            return
        columns, memory = columns[rows], total[rows]
        seconds = estimate_seconds(asked.job, asked.cluster, columns, self.tables)
        stops = np.searchsorted(rows, np.cumsum([len(part) for part in parts])).tolist()
        for start, stop in pairwise((0, *stops)):
            if start < stop:
                self.kept.append(columns[_promising(columns, memory, seconds, np.arange(start, stop))])

    def _refuse(self, columns: Columns, found: Estimates, total: Floats, rows: NDArray[Any]) -> None:
        """Count the plans `rows`, which do not fit, by their largest class of memory or as too large for the host.

        Record the plan with the least device memory. `total`: bytes of every plan.
        """
        if not len(rows):
            return
        too_much = found.host_bytes[rows] > found.host_limit
        if too_much.any():
            one = int(rows[too_much][np.argmin(found.host_bytes[rows[too_much]])])
            known = self.refused.setdefault("memory-host", Refused("memory-host", 0, columns.plan(one), ""))
            known.count += int(too_much.sum())
            known.message = known.message or host_message(float(found.host_bytes[one]), found.host_limit)
            rows = rows[~too_much]
            if not len(rows):
                return
        names = [name for name in found.memory if name not in ("context", "communicators", "reserve")]
        largest = np.argmax(np.stack([found.memory[name][rows] for name in names]), axis=0)
        needed = total[rows]
        classes: list[int] = np.flatnonzero(np.bincount(largest)).tolist()
        for code in classes:
            of_class = largest == code
            one = rows[of_class][np.argmin(needed[of_class])]
            name = f"memory-{names[code]}"
            if name not in self.refused:
                message = (
                    f"the fullest rank needs {format_bytes(float(total[one]))} of {format_bytes(found.usable_bytes)}; "
                    f"the largest part is {names[code]} ({format_bytes(float(found.memory[names[code]][one]))})."
                )
                self.refused[name] = Refused(name, 0, columns.plan(int(one)), message)
            self.refused[name].count += int(of_class.sum())
        if needed.min() < self.least:
            self.least, self.nearest_row = float(needed.min()), columns[rows[[np.argmin(needed)]]]

    @property
    def nearest(self) -> Candidate | None:
        """Plan with the least memory among those that do not fit on the device, or None."""
        if self.nearest_row is None:
            return None
        timed = estimate(self.question.job, self.question.cluster, self.nearest_row, self.tables)
        return candidates(self.question, self.nearest_row, timed)[0]

    def ranked(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the best plans, fastest first, and the Pareto front of memory and time."""
        if not self.kept:
            return [], []
        columns = Columns.concatenate(self.kept)
        found = estimate(self.question.job, self.question.cluster, columns, self.tables)
        memory, speed = found.total_bytes, found.step_s
        chosen = _promising(columns, memory, speed, np.arange(len(columns)))
        columns, found, memory, speed = columns[chosen], _rows(found, chosen), memory[chosen], speed[chosen]
        ranks = rank_seconds(columns, speed)
        relative: Floats = ranks / ranks.min()
        order, border = np.lexsort((memory, np.round(relative, 4))), _border(memory, speed)
        ranked = candidates(self.question, columns[order], _rows(found, order))
        return ranked, candidates(self.question, columns[border], _rows(found, border))


def host_message(needed: float, limit: float) -> str:
    """Describe the host memory that a rank needs, and its limit."""
    return (
        f"a rank keeps {format_bytes(needed)} in its host's memory; its share that may be pinned is "
        f"{format_bytes(limit)}."
    )


def _promising(columns: Columns, memory: Floats, speed: Floats, rows: NDArray[Any]) -> NDArray[Any]:
    memory, speed, ranks = memory[rows], speed[rows], rank_seconds(columns, speed)[rows]
    fastest = rows if len(rows) <= _KEPT else rows[np.argpartition(ranks, _KEPT)[:_KEPT]]
    cells = (columns.tp[rows] * 4096 + columns.pp[rows]) * 4096 + columns.cp[rows]
    order = np.lexsort((ranks, cells))
    starts = np.r_[True, cells[order][1:] != cells[order][:-1]]
    place = np.arange(len(order)) - np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    worth = np.zeros(len(columns), dtype=np.bool_)
    for some in (fastest, rows[order[place < _KEPT_OF_CELL]], rows[_border(memory, speed)]):
        worth[some] = True
    return np.flatnonzero(worth)


def _border(memory: Floats, speed: Floats) -> NDArray[Any]:
    order = np.lexsort((speed, memory))
    best = np.minimum.accumulate(speed[order])
    return order[np.r_[True, best[1:] < best[:-1]]]


def _rows(found: Estimates, rows: Any) -> Estimates:
    index = np.asarray(rows)
    return replace(
        found,
        terms={name: array[index] for name, array in found.terms.items()},
        memory={name: array[index] for name, array in found.memory.items()},
        host_bytes=found.host_bytes[index],
    )
