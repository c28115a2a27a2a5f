"""Plans for every set of axes on 8 ranks, and random plans on 4 and 8 ranks, match one process.

The gate tries the same few plans each time. `--all-plans` tries every set of axes, and many random plans that differ
each time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.choice import gate_runs
from tests.parity.plans import Cell, References, differing
from tests.parity.random_plans import axes_used, cells_of_axis_sets, deep_subjects, random_cells
from weft.errors import CommError
from weft.verify.rank_pool import RankPool

#: Numbers of random plans by number of ranks: in the gate, and with --all-plans.
NUM_RANDOM = {4: (2, 300), 8: (1, 300)}


@pytest.fixture(scope="module")
def ranks8():
    with RankPool(8, timeout_s=900) as pool:  # eight ranks share few cores
        yield pool


def differences_of(cell: Cell, references: References, pool: RankPool) -> list[str]:
    """Return the differences or the error of one cell."""
    try:
        return differing([cell], deep_subjects(), references, pool)
    except CommError as error:
        return [f"{cell.subject} under {cell.plan.format()}: {error}"]


@pytest.mark.full
def test_every_set_of_axes_on_eight_ranks_matches_one_process(plain, ranks8, request):
    """Run the sets of three axes, which contain every pair, or all sets with --all-plans."""
    cells = cells_of_axis_sets(8)
    sizes = {1, 2, 3} if request.config.getoption("--all-plans") else {3}
    cells = [cell for cell in cells if len(axes_used(cell.plan).split()) in sizes]
    assert {len(axes_used(cell.plan).split()) for cell in cells} == sizes
    found = [line for cell in cells for line in differences_of(cell, plain, ranks8)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("num_ranks", gate_runs(NUM_RANDOM, 1))
def test_random_plans_match_one_process(num_ranks, plain, request):
    pool = request.getfixturevalue(f"ranks{num_ranks}")
    everything = request.config.getoption("--all-plans")
    found: list[str] = []

    # Failures are collected and not shrunk: a plan is short, and a rank that hangs costs much time.
    @settings(
        max_examples=NUM_RANDOM[num_ranks][everything], derandomize=not everything, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cell=random_cells(num_ranks))
    def check(cell: Cell) -> None:
        found.extend(differences_of(cell, plain, pool))

    check()
    assert not found, "\n".join(found)
