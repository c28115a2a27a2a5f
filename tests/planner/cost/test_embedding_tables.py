"""Costs of embedding tables against sums over all rows and measured exchanges, and the choice of styles."""

from __future__ import annotations

import numpy as np
import pytest

from weft.planner.cost.embedding_tables import TableShape, TableWork, choose, cost_of


def probabilities(rows: int, zipf: float) -> np.ndarray:
    weights = np.arange(1, rows + 1) ** -zipf
    return weights / weights.sum()


@pytest.mark.parametrize("rows, zipf, draws", [(1000, 1.05, 500), (100_000, 1.05, 5000), (5000, 0.0, 3000)])
def test_expected_unique_rows_are_sums_over_rows(rows, zipf, draws):
    table, chances = TableShape(name="t", rows=rows, width=8, zipf=zipf), probabilities(rows, zipf)
    read = 1 - (1 - chances) ** draws
    assert table.unique(draws) == pytest.approx(read.sum(), rel=1e-3)
    assert table.unique(draws, 0.25) == pytest.approx(read[: rows // 4].sum(), rel=5e-3)
    assert table.hit_share(0.05) == pytest.approx(chances[: rows // 20].sum(), rel=5e-3)


def test_bytes_of_a_rank_and_its_exchange():
    table = TableShape(name="t", rows=1000, width=16, ids=4, is_sorted=False)
    work = TableWork(ranks=4, samples=64, optimizer="lazy_adamw")
    rows, columns, one, copied = (cost_of(table, style, work) for style in ("rows", "columns", "one", "replicate"))
    assert rows.weight_bytes == columns.weight_bytes == 250 * 16 * 4
    assert rows.state_bytes == 2 * rows.weight_bytes
    assert one.weight_bytes == copied.weight_bytes == 1000 * 16 * 4
    unique = table.unique(256)
    assert rows.sent_bytes == pytest.approx(0.75 * unique * (2 * 16 * 4 + 4))
    assert columns.sent_bytes == pytest.approx(0.75 * unique * (2 * 16 * 4 + 4 * 4))
    assert copied.sent_bytes == pytest.approx(2 * 0.75 * 1000 * 17 * 4)
    host = cost_of(table, "host", work)
    assert host.host_bytes == rows.device_bytes
    assert host.device_bytes == pytest.approx(0.05 * rows.device_bytes)


def test_neighboring_frequent_ids_make_rows_uneven():
    work = TableWork(ranks=8, samples=2048)
    even, uneven = (
        cost_of(TableShape(name="t", rows=10**6, width=64, is_sorted=is_sorted), "rows", work)
        for is_sorted in (False, True)
    )
    assert even.uneven == 1
    assert 2 < uneven.uneven <= 8
    assert uneven.time_s > even.time_s


def test_choices_follow_size_ids_and_memory():
    tables = [
        TableShape(name="large", rows=10**8, width=64),
        TableShape(name="mixed", rows=10**6, width=64, is_sorted=False),
        TableShape(name="few", rows=20, width=16),
    ]
    work = TableWork(ranks=8, samples=2048)
    found = {one.table.name: one.cost.style for one in choose(tables, work)}
    assert found == {"large": "columns", "mixed": "rows", "few": "replicate"}
    tight = choose(tables, work, device_bytes=10**9)
    assert [one.cost.style for one in tight] == ["host", "rows", "replicate"]
    assert sum(one.cost.device_bytes for one in tight) <= 10**9
    assert tight[0].why.startswith("the tables exceed 954 MiB of a device; this saves ")
    fixed = choose(tables, work, styles={"large": "one"})
    assert (fixed[0].cost.style, fixed[0].why) == ("one", "set by the layout")
