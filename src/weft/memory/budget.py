"""Which policy each block gets, so that what is kept fits a budget and recompute takes the least time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Steps that a budget is cut into. Each block's bytes are rounded up to a step, so this bounds what is given away.
_NUM_STEPS = 16_384


def cheapest_choice(menus: Sequence[Sequence[tuple[int, float]]], budget_bytes: int) -> list[int] | None:
    """One option of each menu, with the least seconds in total and at most `budget_bytes` in total.

    menus: for each block its options as (bytes, seconds). Returns the index of each block's option; None where even
    the smallest options do not fit. Exact up to the rounding of bytes.
    """
    fastest = [min(range(len(menu)), key=lambda i, m=menu: (m[i][1], m[i][0])) for menu in menus]
    if _total(menus, fastest) <= budget_bytes:
        return fastest
    smallest = [min(range(len(menu)), key=lambda i, m=menu: m[i]) for menu in menus]
    if _total(menus, smallest) > budget_bytes:
        return None
    return _cheapest(menus, budget_bytes) or smallest


def _total(menus: Sequence[Sequence[tuple[int, float]]], choice: Sequence[int]) -> int:
    return sum(menu[index][0] for menu, index in zip(menus, choice, strict=True))


def _cheapest(menus: Sequence[Sequence[tuple[int, float]]], budget_bytes: int) -> list[int] | None:
    """The knapsack with one item of each class, by dynamic programming over the steps of the budget."""
    step = max(1, -(-budget_bytes // _NUM_STEPS))
    capacity = budget_bytes // step
    best = np.zeros(capacity + 1)  # least seconds with at most that many steps
    picks = []
    for menu in menus:
        after = np.full(capacity + 1, np.inf)
        pick = np.zeros(capacity + 1, dtype=np.int32)
        for index, (num_bytes, seconds) in enumerate(menu):
            steps = -(-num_bytes // step)
            if steps > capacity:
                continue
            candidate = np.full(capacity + 1, np.inf)
            candidate[steps:] = best[: capacity + 1 - steps] + seconds
            better = candidate < after
            after[better], pick[better] = candidate[better], index
        best = after
        picks.append(pick)
    if not np.isfinite(best[capacity]):
        return None
    choice, left = [], capacity
    for menu, pick in zip(reversed(menus), reversed(picks), strict=True):
        choice.append(int(pick[left]))
        left -= -(-menu[choice[-1]][0] // step)
    return choice[::-1]
