"""Eight ranks in every set of axes, and random plans of the whole space on 4 and 8 ranks, equal one process.

The gate tries the same few plans each time; `--all-plans` tries every set of axes, and many random plans, others each
time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.choice import gate_runs
from tests.parity.plans import Cell, References, differing
from tests.parity.whole_space import axes_used, cell_of_each_set_of_axes, deep_subjects, random_cells
from weft.errors import CommError
from weft.verify.rank_pool import RankPool

#: Random plans on so many ranks: in the gate, with --all-plans.
NUM_RANDOM = {4: (2, 300), 8: (1, 300)}


@pytest.fixture(scope="module")
def ranks8():
    with RankPool(8, timeout_s=900) as pool:  # eight ranks take turns on few cores
        yield pool


def found_wrong(cell: Cell, references: References, pool: RankPool) -> list[str]:
    """What is wrong with one cell, if anything."""
    try:
        return differing([cell], deep_subjects(), references, pool)
    except CommError as error:
        return [f"{cell.subject} under {cell.plan.format()}: {error}"]


@pytest.mark.full
def test_eight_ranks_in_every_set_of_axes(plain, ranks8, request):
    """The gate tries the sets of three axes, in which every pair occurs."""
    cells = cell_of_each_set_of_axes(8)
    sizes = {1, 2, 3} if request.config.getoption("--all-plans") else {3}
    cells = [cell for cell in cells if len(axes_used(cell.plan).split()) in sizes]
    assert {len(axes_used(cell.plan).split()) for cell in cells} == sizes
    found = [line for cell in cells for line in found_wrong(cell, plain, ranks8)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("num_ranks", gate_runs(NUM_RANDOM, 1))
def test_random_plans_equal_one_process(num_ranks, plain, request):
    pool = request.getfixturevalue(f"ranks{num_ranks}")
    everything = request.config.getoption("--all-plans")
    found: list[str] = []

    # Failures are gathered and not shrunk: a plan is short, and a rank that hangs costs much.
    @settings(
        max_examples=NUM_RANDOM[num_ranks][everything], derandomize=not everything, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cell=random_cells(num_ranks))
    def check(cell: Cell) -> None:
        found.extend(found_wrong(cell, plain, pool))

    check()
    assert not found, "\n".join(found)
