"""The ledger: how often, how much and how long each axis communicated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """Sum over the calls of one operation on one axis. seconds: on the host; asynchronous work is not in it."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts collectives by (axis, operation). Give its `record` to `build_mesh`."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def record(self, axis: str, operation: str, num_bytes: int, seconds: float) -> None:
        """Add one call."""
        entry = self._entries.setdefault((axis, operation), Entry())
        entry.calls += 1
        entry.num_bytes += num_bytes
        entry.seconds += seconds

    def entry(self, axis: str, operation: str) -> Entry:
        """What was counted for one operation on one axis (zeros where it never ran)."""
        return self._entries.get((axis, operation), Entry())

    def rows(self) -> list[tuple[str, str, Entry]]:
        """All entries as (axis, operation, sums), the most bytes first."""
        rows = [(axis, operation, entry) for (axis, operation), entry in self._entries.items()]
        return sorted(rows, key=lambda row: (-row[2].num_bytes, row[0], row[1]))

    def seconds_by_axis(self) -> dict[str, float]:
        """Host seconds of all operations of each axis."""
        found: dict[str, float] = {}
        for (axis, _), entry in self._entries.items():
            found[axis] = found.get(axis, 0.0) + entry.seconds
        return found

    def clear(self) -> None:
        """Start counting anew."""
        self._entries.clear()
