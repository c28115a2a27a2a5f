"""The ledger: how often, how much and how long each axis communicated."""

from __future__ import annotations

from dataclasses import dataclass

from weft.units import format_bytes


@dataclass(slots=True)
class LedgerEntry:
    """Sum over the calls of one operation on one axis. seconds: on the host; asynchronous work is not in it."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts collectives by (axis, operation). Give its `record` to `build_mesh`."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], LedgerEntry] = {}

    def record(self, axis: str, operation: str, num_bytes: int, seconds: float) -> None:
        """Add one call.

        Args:
            axis: its name.
            operation: such as "all_reduce".
            num_bytes: that this rank sent.
            seconds: of the host.
        """
        entry = self._entries.setdefault((axis, operation), LedgerEntry())
        entry.calls += 1
        entry.num_bytes += num_bytes
        entry.seconds += seconds

    def entry(self, axis: str, operation: str) -> LedgerEntry:
        """Return what was counted for one operation on one axis (zeros where it never ran)."""
        return self._entries.get((axis, operation), LedgerEntry())

    def rows(self) -> list[tuple[str, str, LedgerEntry]]:
        """Return all entries as (axis, operation, sums), the most bytes first."""
        rows = [(axis, operation, entry) for (axis, operation), entry in self._entries.items()]
        return sorted(rows, key=lambda row: (-row[2].num_bytes, row[0], row[1]))

    def table(self) -> str:
        """Write what was sent, one line for each axis and operation, for a person to read."""
        lines = [f"{'axis':<24}{'operation':<16}{'calls':>8}{'bytes':>12}{'seconds':>10}"]
        for axis, operation, entry in self.rows():
            sent = format_bytes(entry.num_bytes)
            lines.append(f"{axis:<24}{operation:<16}{entry.calls:>8}{sent:>12}{entry.seconds:>10.3f}")
        return "\n".join(lines)

    def seconds_by_axis(self) -> dict[str, float]:
        """Return the host seconds of all operations of each axis."""
        found: dict[str, float] = {}
        for (axis, _), entry in self._entries.items():
            found[axis] = found.get(axis, 0.0) + entry.seconds
        return found

    def clear(self) -> None:
        """Start counting anew."""
        self._entries.clear()
