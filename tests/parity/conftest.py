"""`pytest tests/parity --all-plans` runs every cell of both matrices, not only a choice."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import pytest

from tests.parity.plans import (
    IN_GATE,
    IN_GATE_ON_FOUR,
    ON_FOUR,
    Cell,
    References,
    broad_matrix,
    by_layout,
    chosen_cells,
    full_matrix,
)  # fmt: skip


@pytest.fixture(scope="session")
def plain():
    """Return the results of plain PyTorch by case."""
    return References()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `matrix_cells` and `broad_cells` by layout: each test gets all cells of one layout."""
    everything = metafunc.config.getoption("--all-plans")
    if "matrix_cells" in metafunc.fixturenames:
        cells = {num_ranks: full_matrix(num_ranks) for num_ranks in (2, 4)}
        two = chosen_cells(cells[2])
        chosen = cells if everything else {2: two, 4: chosen_cells(cells[4], groups=ON_FOUR, covered=two)}
        _parametrize_by_layout(metafunc, "matrix_cells", chosen, None if everything else todays_part(chosen, 5))
    if "broad_cells" in metafunc.fixturenames:
        chosen = {num_ranks: broad_matrix(num_ranks, is_complete=everything) for num_ranks in (2, 4)}
        two = chosen_cells(chosen[2], groups=IN_GATE)
        in_gate = {} if everything else {2: two, 4: chosen_cells(chosen[4], groups=IN_GATE_ON_FOUR, covered=two)}
        _parametrize_by_layout(metafunc, "broad_cells", chosen, todays_part(in_gate, 3) if in_gate else None)


def todays_part(cells: dict[int, Sequence[Cell]], parts: int) -> dict[int, Sequence[Cell]]:
    """Return the cells of one of `parts` parts of the layouts, another part each day. The nightly run has all."""
    found: dict[int, Sequence[Cell]] = {}
    for num_ranks, all_cells in cells.items():
        groups = list(by_layout(all_cells).values())
        found[num_ranks] = [cell for group in groups[date.today().toordinal() % parts :: parts] for cell in group]
    return found


def _parametrize_by_layout(
    metafunc: pytest.Metafunc,
    name: str,
    chosen: dict[int, Sequence[Cell]],
    in_gate: dict[int, Sequence[Cell]] | None = None,
) -> None:
    """Parametrize `name` by layout. Cells that are not in `in_gate` (by number of ranks) are marked `full`."""
    found = []
    for num_ranks, cells in chosen.items():
        few = set((in_gate or chosen)[num_ranks])
        for layout, group in by_layout([cell for cell in cells if cell in few]).items():
            found.append(pytest.param((num_ranks, group), id=f"{num_ranks}-{layout}"))
        for layout, group in by_layout([cell for cell in cells if cell not in few]).items():
            found.append(pytest.param((num_ranks, group), id=f"{num_ranks}-{layout}-more", marks=pytest.mark.full))
    metafunc.parametrize(name, found)
