"""Which values of a plan's fields the planner looks at, which lie near a plan, and which tests try."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from weft.spec.divisors import common_divisors
from weft.spec.plan.plan_field import SearchFacts

#: Shares of saved activations and of optimizer states that lie between all and nothing: round ones, and fine ones.
_BUDGETS = ("75%", "50%", "25%")
_FINE_BUDGETS = tuple(f"{percent}%" for percent in range(95, 5, -5))
_SHARES = ("optimizer:0.5", "activations:0.5")
_FINE_SHARES = tuple(f"{name}:{eighth / 8:g}" for name in ("optimizer", "activations") for eighth in range(1, 8))
#: Stages on a rank that interleaved schedules try.
_DEEP = (2, 3, 4, 5, 6, 8, 10, 12)


def schedules(facts: SearchFacts) -> list[tuple[str, int]]:
    """Schedules with their virtual stages."""
    deep = [stages for stages in _DEEP if 2 * stages <= facts.layers]
    straight = [(name, 1) for name in ("gpipe", "1f1b", "zb_h1")]
    v_shaped = [(name, 2) for name in ("zb_v", "dualpipe_v")]
    return [*straight, *v_shaped, *((name, stages) for name in ("interleaved", "zb_interleaved") for stages in deep)]


def recomputes(facts: SearchFacts) -> tuple[str, ...]:
    """Policies; flash attention keeps no scores that a policy of its own could drop."""
    return ("none", "selective", "full", *(() if facts.flash else ("attention",)))


def precisions(facts: SearchFacts) -> tuple[str, ...]:
    """The device's best half format, and full precision."""
    return (*facts.half_formats[:1], "fp32")


def recomputes_near(plan: Any, facts: SearchFacts, fine: bool) -> Iterator[str]:
    """Recompute of some layers: by a budget, and of a pipeline's ranks by a number of blocks."""
    if plan.pp == 1:
        yield from _FINE_BUDGETS if fine else _BUDGETS
        if fine and plan.recompute.endswith("%"):
            percent = int(plan.recompute[:-1])
            yield from (f"{each}%" for each in range(max(1, percent - 4), min(99, percent + 4) + 1))
        return
    most = -(-facts.layers // plan.pp)
    counts = {round(most * eighth / 8) for eighth in (range(1, 8) if fine else (4,))}
    if fine and plan.recompute_blocks:
        counts |= {plan.recompute_blocks + step for step in (-2, -1, 1, 2)}
    for count in sorted(counts & set(range(1, most))):
        yield from (f"{policy}:{count}" for policy in ("full", "selective"))


def offloads_near(plan: Any, facts: SearchFacts, fine: bool) -> Iterator[tuple[str, ...]]:
    """A share of one thing on the host."""
    yield from ((share,) for share in (_FINE_SHARES if fine else _SHARES))


def orders_near(plan: Any, facts: SearchFacts, fine: bool) -> Iterator[tuple[str, ...]]:
    """Other orders of the axes in use: all of up to three, and of more those in which two neighbours change places."""
    now = tuple(axis for axis in plan.axis_order if getattr(plan, axis) > 1)
    if len(now) <= 3:
        yield from itertools.permutations(now)
        return
    for place in range(len(now) - 1):
        yield (*now[:place], now[place + 1], now[place], *now[place + 2 :])


def sizes_tried(num_ranks: int, passes: Sequence[int]) -> Sequence[int]:
    """Every size of an axis that the ranks allow."""
    return common_divisors(num_ranks)


def microbatches_tried(num_ranks: int, passes: Sequence[int]) -> Sequence[int]:
    """The passes, and as many as schedules want: some want two for each stage."""
    return sorted({*passes, num_ranks, 2 * num_ranks})


def passes_tried(num_ranks: int, passes: Sequence[int]) -> Sequence[int]:
    """The passes."""
    return passes
