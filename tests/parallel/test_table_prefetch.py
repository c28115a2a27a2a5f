"""Rows that are fetched under the backward before give the same numbers, and are fetched again if they are others."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.table_cases import SAMPLES, Script, TableCase, reference, samples
from tests.parallel.test_tables import MIXED, assert_same
from weft.comm.ledger import Ledger

LAYOUTS = [MIXED, "{user,item,genre,seen,tags}=rows", "{user,seen}=host {item,genre,tags}=columns"]
PLANS = ["dp_replicate=2", "dp_shard=2 zero=2 accumulation=2"]


def train(case: TableCase):
    script = Script(case, prefetch=True)
    used = count_used(script)
    found = []
    for index in range(case.steps):
        following = script.batch(index + 1) if index + 1 < case.steps else None
        found.append(script.step(script.batch(index), next_batch=following))
    return ([(one.loss, one.grad_norm) for one in found], script.weights()), used


def count_used(script: Script) -> list[bool]:
    """Return a list that gets True for each prefetch that is used, and False for each that is fetched again."""
    from weft.parallel.tables.prefetch import Prefetch

    used, calls = [], Prefetch.calls

    def counted(self, waiting):
        found = calls(self, waiting)
        used.append(found is not None)
        return found

    Prefetch.calls = counted
    return used


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_prefetched_rows_equal_plain_torch(layout, plan, ranks2):
    case = TableCase(layout, plan, "lazy_adamw")
    for found, used in ranks2.run(train, case):
        assert_same(found, case)
        print(used)
