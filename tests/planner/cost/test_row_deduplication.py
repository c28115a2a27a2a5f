"""Deduplication of equal rows: each row maps to its representative."""

from __future__ import annotations

import numpy as np
import pytest

from weft.planner.cost.row_dedupe import RowDeduplicator
from weft.planner.space.columns import Columns


def many(num_rows: int) -> Columns:
    draw = np.random.default_rng(0)
    return Columns.make(
        num_rows,
        tp=draw.choice([1, 2, 4, 8], num_rows),
        microbatch=draw.choice([1, 3, 2**20], num_rows),
        offload_params=draw.choice([0.0, 0.125, 1.0], num_rows),
        sp=draw.choice([False, True], num_rows),
    )


@pytest.mark.parametrize("num_rows", [1, 10, 5000])
def test_each_row_maps_to_a_row_with_its_values(num_rows):
    columns, names = many(num_rows), ("tp", "sp", "microbatch", "offload_params", "zero")
    beside = np.arange(num_rows) % 2
    found = RowDeduplicator.of(columns, names, [beside])
    for name in names:
        np.testing.assert_array_equal(getattr(found.rows, name)[found.index], getattr(columns, name))
    np.testing.assert_array_equal(beside[found.first][found.index], beside)
    assert len(found.rows) <= 4 * 2 * 3 * 3 * 2 or num_rows < 144


def test_slice_of_rows_has_the_same_representatives():
    columns = many(5000)
    found = RowDeduplicator.of(columns, ("tp", "sp"))
    part = found[slice(1000, 1100)]
    np.testing.assert_array_equal(part.rows.tp[part.index], columns.tp[1000:1100])


def test_changes_replace_columns_and_unnamed_columns_are_missing():
    columns = many(5000)
    found = RowDeduplicator.of(columns, ("tp", "microbatch"), microbatch=np.minimum(2, columns.microbatch))
    assert set(found.rows.microbatch.tolist()) == {1, 2}
    with pytest.raises(AttributeError):
        _ = found.rows.sp
