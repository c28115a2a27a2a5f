"""Private steps under plans against a plain loop over single samples, in float64."""

from __future__ import annotations

import functools

import pytest

from tests.privacy.private_cases import LIMIT, PrivateCase, difference, plain, train


@functools.cache
def wanted(model: str, noise: float, steps: int, batch: int) -> dict:
    return plain(PrivateCase(model, noise=noise, steps=steps, batch=batch))


def assert_same(found, case: PrivateCase) -> None:
    want = wanted(case.model, case.noise, case.steps, case.batch)
    assert difference(found, want) <= LIMIT, case


@pytest.mark.parametrize("model", ["net", "decoder", "tied", "gpt2", "experts", "lora"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_rank(model, passes):
    for noise in (0.0, 0.7):
        case = PrivateCase(model, "accumulation=2" if passes == 2 else "", noise=noise, passes=passes)
        assert_same(train(case), case)


def test_ten_steps_with_empty_draws():
    case = PrivateCase("net", steps=10, batch=1)
    assert_same(train(case), case)
