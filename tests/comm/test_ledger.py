from __future__ import annotations

from weft.comm import Ledger


def test_the_ledger_adds_calls_bytes_and_seconds_by_axis_and_operation():
    ledger = Ledger()
    ledger.record("tp", "all_reduce", 100, 0.5)
    ledger.record("tp", "all_reduce", 20, 0.25)
    ledger.record("dp_shard", "broadcast", 500, 1.0)
    entry = ledger.entry("tp", "all_reduce")
    assert (entry.calls, entry.num_bytes, entry.seconds) == (2, 120, 0.75)
    assert [(axis, operation) for axis, operation, _ in ledger.rows()] == [
        ("dp_shard", "broadcast"),
        ("tp", "all_reduce"),
    ]
    ledger.clear()
    assert ledger.rows() == []
    assert ledger.entry("tp", "all_reduce").calls == 0
