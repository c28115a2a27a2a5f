"""One step from a plan to its neighbours in the space: what why-not proposes and what annealing tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from weft.errors import PlanError
from weft.planner.estimate import estimate
from weft.planner.search.candidate import Candidate, candidates
from weft.planner.search.question import Question
from weft.planner.space import Columns, Job, Space, settled
from weft.spec.plan import AXES, Plan, plan_fields
from weft.spec.rules.plan_rules import check
from weft.spec.rules.rule import common_divisors
from weft.spec.shares import samples_per_microbatch

#: Shares of saved activations and of optimizer states that lie between all and nothing: round ones, and fine ones.
BUDGETS = ("75%", "50%", "25%")
SHARES = ("optimizer:0.5", "activations:0.5")
FINE_BUDGETS = tuple(f"{percent}%" for percent in range(95, 5, -5))
FINE_SHARES = tuple(f"{name}:{eighth / 8:g}" for name in ("optimizer", "activations") for eighth in range(1, 8))
_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")


def neighbours(plan: Plan, question: Question, *, fine: bool = False) -> Iterator[Plan]:
    """Legal plans that are one change away, each once; decided fields stay as they are. fine: in small steps."""
    space = Space.whole(question.job, question.cluster, question.fixed)
    words = _words(plan)
    seen = {plan, _fitted(words, question.job)}
    for change in _changes(plan, space, question, fine):
        try:
            found = _fitted(words | change, question.job)
        except PlanError:
            continue
        if found not in seen and _keeps(found, question.fixed):
            seen.add(found)
            if not check(found, question.facts, question.rules):
                yield found


def _words(plan: Plan) -> dict[str, Any]:
    """Every field with its value."""
    return {name: getattr(plan, name) for name in plan_fields()}


def _keeps(plan: Plan, fixed: Mapping[str, Any]) -> bool:
    """Whether every decided field has its value; the way of context parallelism counts only where there is any."""
    return all(getattr(plan, name) == value or (name == "cp_mode" and plan.cp == 1) for name, value in fixed.items())


def _changes(plan: Plan, space: Space, question: Question, fine: bool) -> Iterator[dict[str, Any]]:
    for zero, reshard in (*space.shardings, (0, "after_forward")):
        yield {"zero": zero, "reshard": reshard}
    for recompute in (*space.recomputes, *_mixtures(plan, question, fine)):
        yield {"recompute": recompute}
    for offload in (*space.offloads, *((share,) for share in (FINE_SHARES if fine else SHARES))):
        yield {"offload": offload}
    for name, values in (("precision", space.precisions), ("compile", space.compiles),
                         ("sp", space.sequence_parallel), ("cp_mode", space.cp_modes)):  # fmt: skip
        for value in values:
            yield {name: value}
    if plan.pp > 1:
        for schedule, stages in space.schedules:
            yield {"schedule": schedule, "virtual_stages": stages}
    for order in _orders(plan):
        yield {"order": order}
    yield from _batches(plan, question)
    yield from _meshes(plan, question)


def _mixtures(plan: Plan, question: Question, fine: bool) -> Iterator[str]:
    """Recompute of some layers: by a budget, and of a pipeline's ranks by a number of blocks."""
    if plan.pp == 1:
        yield from FINE_BUDGETS if fine else BUDGETS
        if fine and plan.recompute.endswith("%"):
            percent = int(plan.recompute[:-1])
            yield from (f"{each}%" for each in range(max(1, percent - 4), min(99, percent + 4) + 1))
        return
    most = -(-question.job.shape.layers // plan.pp)
    counts = {round(most * eighth / 8) for eighth in (range(1, 8) if fine else (4,))}
    if fine and plan.recompute_blocks:
        counts |= {plan.recompute_blocks + step for step in (-2, -1, 1, 2)}
    for count in sorted(counts & set(range(1, most))):
        yield from (f"{policy}:{count}" for policy in ("full", "selective"))


def _orders(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Other orders of the axes in use: all of up to three, and of more those in which two neighbours change places."""
    now = tuple(axis for axis in plan.axis_order if getattr(plan, axis) > 1)
    if len(now) <= 3:
        yield from itertools.permutations(now)
        return
    for place in range(len(now) - 1):
        yield (*now[:place], now[place + 1], now[place], *now[place + 2 :])


def _batches(plan: Plan, question: Question) -> Iterator[dict[str, Any]]:
    """Other numbers of passes: the next ones up and down."""
    if question.job.global_batch % plan.dp_size:
        return
    legal = common_divisors(question.job.global_batch // plan.dp_size)
    now = plan.microbatches_per_step
    for passes in [*[each for each in legal if each < now][-2:], *[each for each in legal if each > now][:2]]:
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
    wanted = max(1, samples_per_microbatch(batch, plan.dp_size, plan.microbatches_per_step))
    fits = [each for each in common_divisors(sequences) if each <= wanted]
    return _passes(plan.replace(pp=moved["pp"]), sequences // fits[-1])


def _passes(plan: Plan, count: int) -> dict[str, Any]:
    return {"microbatches": count, "accumulation": 1} if plan.pp > 1 else {"microbatches": 1, "accumulation": count}


def _primes(number: int) -> list[int]:
    return [each for each in common_divisors(number) if each > 1 and all(each % low for low in range(2, each))]


def _fitted(values: Mapping[str, Any], job: Job) -> Plan:
    """A plan of these values; what belongs to an axis that is not in use goes back to its default."""
    found = dict(values)
    default = Plan()
    if found["pp"] == 1:
        found |= {"schedule": default.schedule, "virtual_stages": 1}
    if found["schedule"] in _ONE_STAGE:
        found["virtual_stages"] = 1
    if found["tp"] == 1:
        found["sp"] = False
    if found["dp_shard"] == found["cp"] == 1:
        found["zero"] = 0
    if found["dp_shard"] > 1 and found["ep"] == 1:
        found["zero"] = max(1, found["zero"])
    if found["zero"] != 3:
        found["reshard"] = default.reshard
    in_use = tuple(axis for axis in AXES if found[axis] > 1)
    if found["order"] == in_use or set(found["order"]) != set(in_use) or found["ep"] > 1:
        found["order"] = ()
    return settled(Plan(**found), job)


def estimated(plans: Iterable[Plan], question: Question) -> list[Candidate]:
    """Plans with their estimates, in their order; each says its way of context parallelism."""
    listed = [settled(plan, question.job) for plan in plans]
    if not listed:
        return []
    columns = Columns.of(listed, question.job)
    found = estimate(question.job, question.cluster, columns, question.tables)
    return candidates(question, columns, found, listed)


def changed_words(before: Plan, after: Plan) -> str:
    """What differs, as it is typed: "tp=4 accumulation=8"."""
    old, new = _words(before), _words(after)
    words = [name for name, value in new.items() if value != old[name] and (name != "cp_mode" or after.cp > 1)]
    return " ".join(f"{name}={_shown(new[name])}" for name in words)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ("+".join(cast(tuple[str, ...], value)) or "none") if isinstance(value, tuple) else str(value)
