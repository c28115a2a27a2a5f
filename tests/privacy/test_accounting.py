"""Epsilon by two accountants, noise for an epsilon, and Poisson draws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from weft.config.privacy.largest_draw import most_drawn
from weft.errors import PlanError
from weft.privacy.accounting import Steps, epsilon_of, noise_for
from weft.privacy.draws import drawn
from weft.privacy.ledger import PrivacyLedger
from weft.privacy.settings import Privacy


def settings(number: int) -> list[tuple[Steps, float]]:
    """Settings with an epsilon from about 0.1 to 20."""
    choose = random.Random(0)
    return [
        (
            Steps(choose.uniform(0.7, 3.0), 10 ** choose.uniform(-2.5, -0.8), choose.choice([50, 200, 500, 1000])),
            10 ** choose.uniform(-7, -4),
        )
        for _ in range(number)
    ]


def assert_close(chosen: list[tuple[Steps, float]]) -> None:
    for steps, delta in chosen:
        first, second = epsilon_of([steps], delta, "prv"), epsilon_of([steps], delta, "pld")
        assert first == pytest.approx(second, rel=0.01), (steps, delta)


def test_accountants_agree():
    assert_close(settings(3))


@pytest.mark.full
def test_accountants_agree_in_50_settings():
    assert_close(settings(50))


def test_noise_for_an_epsilon():
    noise = noise_for(2.0, 1e-4, 0.06, 300)
    assert 1.99 < epsilon_of([Steps(noise, 0.06, 300)], 1e-4) <= 2.0
    assert epsilon_of([], 1e-5) == 0.0
    assert epsilon_of([Steps(0.0, 0.1, 1)], 1e-5) == math.inf
    with pytest.raises(
        PlanError, match=r"privacy.epsilon=1e-05: 100000 steps with 1 of the records each exceed it at any"
    ):
        noise_for(1e-5, 1e-6, 1.0, 100000)


def test_history_is_composed():
    ledger = PrivacyLedger(Privacy(1000, 64, 100, 1e-4, epsilon=3.0, noise=1.1))
    assert not ledger.is_spent
    affordable = ledger.affordable
    assert affordable is not None
    assert 0 < affordable < 100
    assert ledger.epsilon(more=affordable) <= 3.0 < ledger.epsilon(more=affordable + 1)
    for _ in range(affordable):
        ledger.add()
    assert ledger.is_spent
    again = PrivacyLedger(Privacy(1000, 64, 100, 1e-4, epsilon=4.0, noise=2.0))
    again.restore(ledger.to_json())
    assert again.epsilon() == pytest.approx(ledger.epsilon())
    assert not again.is_spent


def test_draws_depend_on_nothing_else():
    key = b"k" * 32
    first = drawn(key, 3, 200_000, 0.01)
    assert len(set(first.tolist())) == len(first)
    assert first.tolist() == sorted(first.tolist())
    fewer = drawn(key, 3, 150_000, 0.01)
    assert fewer.tolist() == first[first < 150_000].tolist()
    assert drawn(key, 4, 200_000, 0.01).tolist() != first.tolist()
    assert drawn(b"o" * 32, 3, 200_000, 0.01).tolist() != first.tolist()
    assert drawn(key, 0, 10, 1.0).tolist() == list(range(10))


def test_draws_are_poisson():
    sizes = np.array([len(drawn(b"k" * 32, step, 1000, 0.05)) for step in range(400)])
    assert abs(sizes.mean() - 50) < 5 * math.sqrt(47.5 / 400)
    assert abs(sizes.var() - 47.5) < 15
    assert sizes.max() <= most_drawn(50, 0.05, 400)
