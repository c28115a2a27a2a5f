"""Row tables: rows round-trip, and damage is found before training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.store.row_table import RowTable, RowWriter, ready_table
from weft.errors import DataError

ROWS = st.lists(st.tuples(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), st.floats(width=32)), max_size=12)


@given(rows=ROWS)
@settings(max_examples=40, deadline=None)
def test_rows_round_trip(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    with RowWriter(folder) as writer:
        for ids, number in rows:
            writer.add({"ids": np.array(ids, np.int32), "number": np.array([number], np.float32)})
        writer.finish({"labels": ["a", "b"]})
    table = RowTable(folder)
    assert len(table) == len(rows)
    assert table.notes == {"labels": ["a", "b"]}
    assert not table.problems()
    for row, (ids, number) in zip((table[index] for index in range(len(rows))), rows, strict=True):
        assert row["ids"].dtype == np.int32
        assert row["ids"].tolist() == ids
        np.testing.assert_array_equal(row["number"], np.array([number], np.float32))
    with pytest.raises(IndexError):
        table[len(rows)]


def test_table_is_written_once_and_again_if_damaged(tmp_path):
    written = []

    def write(writer):
        written.append(True)
        writer.add({"ids": np.arange(5, dtype=np.int32)})
        return {"made": len(written)}

    first = ready_table(tmp_path, ["key", 1], write, None)
    assert ready_table(tmp_path, ["key", 1], write, None).digest == first.digest
    assert len(written) == 1
    assert ready_table(tmp_path, ["key", 2], write, None).folder != first.folder
    values = first.folder / "ids.values"
    values.write_bytes(values.read_bytes()[:-1] + b"\x7f")  # the same length as before
    assert RowTable(first.folder).problems() == ["ids.values does not match its digest"]
    assert ready_table(tmp_path, ["key", 1], write, None)[0]["ids"].tolist() == [0, 1, 2, 3, 4]
    values.write_bytes(b"")
    with pytest.raises(DataError, match=r"no table of rows can be read there \(ids.values has 0 bytes, not 20\)"):
        RowTable(first.folder)
    assert len(ready_table(tmp_path, ["key", 1], write, None)) == 1
    assert len(written) == 4
