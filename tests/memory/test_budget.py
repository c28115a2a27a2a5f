"""The cheapest choice within a memory budget, compared with all choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.memory.policy import cheapest_choice

menus = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(menus, st.integers(0, 200))
def test_choice_is_the_best_of_all_choices(menu_list, budget):
    choice = cheapest_choice(menu_list, budget)
    fitting = [
        sum(option[1] for option in options)
        for options in itertools.product(*menu_list)
        if sum(option[0] for option in options) <= budget
    ]
    assert (choice is None) == (not fitting)
    if choice is not None:
        picked = [menu[index] for menu, index in zip(menu_list, choice, strict=True)]
        assert sum(option[0] for option in picked) <= budget
        assert sum(option[1] for option in picked) == pytest.approx(min(fitting))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 10)), min_size=1, max_size=4), max_size=9),
       st.floats(0, 1))  # fmt: skip
def test_large_sizes_never_exceed_the_budget_by_rounding(menu_list, share):
    budget = int(share * sum(max(size for size, _ in menu) for menu in menu_list))
    choice = cheapest_choice(menu_list, budget)
    least = sum(min(size for size, _ in menu) for menu in menu_list)
    assert (choice is None) == (least > budget)
    if choice is not None:
        assert sum(menu[index][0] for menu, index in zip(menu_list, choice, strict=True)) <= budget


def test_two_options_slightly_over_budget_are_not_both_chosen():
    menu = [(81_929, 0.0), (0, 1.0)]
    assert sorted(cheapest_choice([menu, menu], 163_840)) == [0, 1]


def test_many_blocks_use_over_98_percent_of_the_budget():
    gib = 2**30
    menu = [(2 * gib + 12345, 0.0), (gib + 777, 0.5), (100_001, 1.0)]
    budget = 100 * gib
    choice = cheapest_choice([menu] * 126, budget)
    total = sum(menu[index][0] for index in choice)
    assert 0.98 * budget < total <= budget


def test_negative_budget_has_no_choice():
    assert cheapest_choice([[(0, 1.0)]], -1) is None
    assert cheapest_choice([[(5, 1.0), (0, 2.0)]], 0) == [1]
