"""`pytest tests/parity --all-plans`: every cell of the matrix, not only those that the gate runs."""

from __future__ import annotations

import pytest

from tests.parity.plans import References, by_layout, chosen_cells, full_matrix


@pytest.fixture(scope="session")
def plain():
    """What PyTorch alone computes, by case."""
    return References()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of `matrix_cells` get all cells of one layout at a time."""
    if "matrix_cells" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--all-plans")
    values, ids = [], []
    for num_ranks in (2, 4):
        cells = full_matrix(num_ranks)
        for layout, group in by_layout(cells if everything else chosen_cells(cells)).items():
            values.append((num_ranks, group))
            ids.append(f"{num_ranks}-{layout}")
    metafunc.parametrize("matrix_cells", values, ids=ids)
