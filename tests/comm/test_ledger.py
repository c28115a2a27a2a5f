from __future__ import annotations

from weft.comm.ledger import Ledger


def test_ledger_sums_calls_bytes_and_seconds_by_axis_and_operation():
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


class Wait:
    """Wait time on a device, which is read lazily. `num_reads` counts the reads."""

    def __init__(self, seconds):
        self._seconds, self.num_reads = seconds, 0

    def seconds(self):
        self.num_reads += 1
        return self._seconds


def test_device_waits_are_read_only_on_demand():
    ledger = Ledger()
    waits = [Wait(1.0), Wait(2.0), Wait(4.0)]
    ledger.record("tp", "all_reduce", 8, waits[0])
    start = ledger.mark()
    ledger.record("tp", "all_reduce", 8, waits[1])
    ledger.record("dp_shard", "all_gather", 8, 0.5)
    end = ledger.mark()
    ledger.record("tp", "all_gather", 8, waits[2])
    assert not any(wait.num_reads for wait in waits)
    assert ledger.seconds_between(start, end) == {"tp": 2.0, "dp_shard": 0.5}
    assert (waits[0].num_reads, waits[2].num_reads) == (0, 0)
    assert ledger.entry("tp", "all_reduce").seconds == 3.0
    assert (ledger.entry("tp", "all_gather").seconds, ledger.entry("dp_shard", "all_gather").seconds) == (4.0, 0.5)


def test_reading_entries_keeps_the_times_between_marks():
    ledger, wait = Ledger(), Wait(2.0)
    start = ledger.mark()
    ledger.record("tp", "all_reduce", 8, wait)
    end = ledger.mark()
    assert [ledger.entry("tp", "all_reduce").seconds for _ in range(2)] == [2.0, 2.0]
    ledger.table()
    assert ledger.seconds_between(start, end) == {"tp": 2.0}
    ledger.clear()
    assert ledger.seconds_between(start, end) == {"tp": 2.0}
    ledger.record("tp", "all_reduce", 8, Wait(0.5))
    assert ledger.entry("tp", "all_reduce").seconds == 0.5
    assert ledger.seconds_between(end, ledger.mark()) == {"tp": 0.5}


def test_number_of_unread_waits_is_bounded():
    ledger = Ledger()
    waits = [Wait(1.0) for _ in range(2**14 + 5)]
    for wait in waits:
        ledger.record("tp", "all_reduce", 8, wait)
    assert sum(wait.num_reads for wait in waits) == 5
    assert ledger.entry("tp", "all_reduce").seconds == len(waits)
