"""Hugging Face's families, built from their configs, train as on one process under every legal layout of 2 ranks."""

from __future__ import annotations

import pytest

from tests.parity.families import FAMILIES
from tests.parity.plans import Cell, differing, families


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_one_process(name, plain, ranks2):
    known = families()
    plans = known[name].plans(2, accumulation=(1,), microbatches=(1, 2), recompute=("none",), offload=((),))
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    found = differing([Cell(name, plan) for plan in plans], known, plain, ranks2)
    assert not found, "\n".join(found)
