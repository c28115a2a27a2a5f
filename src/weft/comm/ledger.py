"""The ledger: number of calls, bytes and time of the collectives of each axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from weft.comm.mesh import Waited
from weft.units import format_bytes

#: Maximum number of stream waits kept for `seconds_between`. One step has fewer; older waits are complete.
_MOST_KEPT = 2**14


@dataclass(slots=True)
class LedgerEntry:
    """Sum over the calls of one operation on one axis.

    Attributes:
        num_bytes: bytes of the tensors on this rank in their wire format.
        sent_bytes: bytes that this rank sent to others; 0 over nccl, which does not report it.
        off_host_bytes: the part of `sent_bytes` that left this rank's host.
        seconds: time that the host waited, or the device's compute stream if the host does not wait. Time overlapped by
            other work is not included.
    """

    calls: int = 0
    num_bytes: int = 0
    sent_bytes: int = 0
    off_host_bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts collectives by (axis, operation). Pass its `record` to `build_mesh` and the ledger to a `Meter`."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], LedgerEntry] = {}
        self._host: dict[str, float] = {}
        self._waits: deque[tuple[str, str, Waited]] = deque()
        self._num_dropped = 0  # waits before the first of `_waits`
        self._num_read = 0  # waits that the entries contain

    def record(
        self,
        axis: str,
        operation: str,
        num_bytes: int,
        seconds: float | Waited,
        sent_bytes: int = 0,
        off_host_bytes: int = 0,
    ) -> None:
        """Add one call. If very many stream waits are unread, wait for the oldest and read it.

        Args:
            axis, operation: name of the axis, and of the collective.
            num_bytes: size of the tensor on this rank, in its wire format.
            seconds: time that the host waited, or an object that returns how long the device's stream waited.
            sent_bytes: bytes that this rank sent to others.
            off_host_bytes: the part of `sent_bytes` that left its host.
        """
        entry = self._entries.setdefault((axis, operation), LedgerEntry())
        entry.calls += 1
        entry.num_bytes += num_bytes
        entry.sent_bytes += sent_bytes
        entry.off_host_bytes += off_host_bytes
        if isinstance(seconds, int | float):
            entry.seconds += seconds
            self._host[axis] = self._host.get(axis, 0.0) + seconds
            return
        self._waits.append((axis, operation, seconds))
        if len(self._waits) > _MOST_KEPT:
            self._read(self._num_dropped + 1)
            self._waits.popleft()
            self._num_dropped += 1

    def off_host_bytes(self) -> int:
        """Return how many bytes this rank sent to other hosts."""
        return sum(entry.off_host_bytes for entry in self._entries.values())

    def entry(self, axis: str, operation: str) -> LedgerEntry:
        """Return the counts of one operation on one axis; all are zero if it never ran. Waits for the device."""
        self._read()
        return self._entries.get((axis, operation), LedgerEntry())

    def sent(self) -> dict[str, int]:
        """Return the total `num_bytes` of all collectives so far, by axis: sizes of tensors, not bytes sent.

        Other threads may call this; it does not wait.
        """
        found: dict[str, int] = {}
        for (axis, _), entry in list(self._entries.items()):
            found[axis] = found.get(axis, 0) + entry.num_bytes
        return found

    def rows(self) -> list[tuple[str, str, LedgerEntry]]:
        """Return all entries as (axis, operation, sums), largest number of bytes first. Waits for the device."""
        self._read()
        rows = [(axis, operation, entry) for (axis, operation), entry in self._entries.items()]
        return sorted(rows, key=lambda row: (-row[2].num_bytes, row[0], row[1]))

    def table(self) -> str:
        """Return a table of the traffic, one line for each axis and operation. Waits for the device."""
        lines = [f"{'axis':<24}{'operation':<16}{'calls':>8}{'bytes':>12}{'sent':>12}{'off host':>12}{'seconds':>10}"]
        for axis, operation, entry in self.rows():
            sizes = "".join(
                f"{format_bytes(number):>12}" for number in (entry.num_bytes, entry.sent_bytes, entry.off_host_bytes)
            )
            lines.append(f"{axis:<24}{operation:<16}{entry.calls:>8}{sizes}{entry.seconds:>10.3f}")
        return "\n".join(lines)

    def mark(self) -> tuple[Mapping[str, float], int]:
        """Return a marker of the current counts for `seconds_between`, without waiting for the device."""
        return dict(self._host), self._num_recorded

    def seconds_between(
        self, start: tuple[Mapping[str, float], int], end: tuple[Mapping[str, float], int]
    ) -> dict[str, float]:
        """Return the seconds by axis that computation waited between two marks. Waits for the device.

        Call it before methods that read waits (`entry`, `rows`, `table`): stream waits that they read are left out.
        """
        found = {axis: seconds - start[0].get(axis, 0.0) for axis, seconds in end[0].items()}
        for place in range(max(0, start[1] - self._num_dropped), end[1] - self._num_dropped):
            axis, _, wait = self._waits[place]
            found[axis] = found.get(axis, 0.0) + wait.seconds()
        return found

    def clear(self) -> None:
        """Reset all counts."""
        self._entries.clear()
        self._host.clear()
        self._num_read = self._num_recorded

    @property
    def _num_recorded(self) -> int:
        return self._num_dropped + len(self._waits)

    def _read(self, end: int | None = None) -> None:
        """Add the times of the unread waits before number `end`, or of all, to their entries."""
        for number in range(self._num_read, self._num_recorded if end is None else end):
            axis, operation, wait = self._waits[number - self._num_dropped]
            self._entries[axis, operation].seconds += wait.seconds()
            self._num_read = number + 1
