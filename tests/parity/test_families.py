"""Hugging Face's families, built from their configs, train as on one process under the legal layouts of 2 ranks."""

from __future__ import annotations

import pytest

from tests.parity.families import FAMILIES
from tests.parity.plans import FAMILY_GROUPS, chosen_cells, differing, families, family_cells


@pytest.fixture(scope="module")
def cells(request):
    """By family. The gate's share covers all pairs of axes; `--all-plans` runs every layout."""
    every = family_cells()
    return every if request.config.getoption("--all-plans") else chosen_cells(every, groups=FAMILY_GROUPS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_one_process(name, cells, plain, ranks2):
    mine = [cell for cell in cells if cell.subject == name]
    assert {cell.plan.zero for cell in mine} == {0, 1, 2, 3}
    found = differing(mine, families(), plain, ranks2)
    assert not found, "\n".join(found)
