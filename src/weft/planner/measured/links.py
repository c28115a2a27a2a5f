"""Measured links between ranks: the fastest transport for each collective of an axis, and its time."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import env
from weft.planner.measured.machine_profile import Machine, expect_keys, file_text, read_file, read_row, write_atomic
from weft.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoices:
    """Measured transports for groups with the same number of hosts and of ranks per host. Can be sent as JSON.

    Attributes:
        best: (minimum bytes, transport) by operation, in ascending order of bytes.
        laws: fitted coefficients of 1, sqrt(bytes), bytes (time in s), by operation and transport.
        gains: descriptions of the cases that use another transport than the default one.
    """

    best: Mapping[str, Sequence[tuple[int, str]]]
    laws: Mapping[str, Mapping[str, Sequence[float]]]
    gains: Sequence[str]

    def transport(self, op: str, num_bytes: int, fixed: str) -> str:
        """Return the transport to use for a call; `fixed` if the operation has no measured choice."""
        found = fixed
        for least, transport in self.best.get(op, ()):
            found = transport if num_bytes >= least else found
        return found

    def seconds(self, op: str, num_bytes: int, transport: str) -> float:
        """Return the time (s) of a call by the fitted coefficients; 0 if its transport was not measured."""
        law = self.laws.get(op, {}).get(transport)
        return law[0] + law[1] * math.sqrt(num_bytes) + law[2] * num_bytes if law else 0.0


# Links between ranks on one host and on several, as measured by `weft calibrate --hosts`, in a JSON file.

VERSION = 1
#: Another transport than the default is chosen only if it takes less than this share of the time. Smaller gains are
#: noise.
BETTER = 0.9
#: A choice applies up to this many times the largest measured size.
_REACH = 4
#: Operations with a measured choice. All others use the default transport.
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Measured time (s) of one call over one transport.

    Attributes:
        hosts: number of hosts of its group.
        ranks: number of ranks of the group on each host.
        size: bytes of the call.
        spread: relative spread of the measured times.
    """

    op: str
    transport: str
    hosts: int
    ranks: int
    size: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """All measurements of links between ranks.

    Attributes:
        hosts: number of participating hosts.
        ranks: number of participating ranks on each host.
        made, took_s: time at which the file was created, and duration (s) of the measurements.
    """

    machine: Machine
    hosts: int
    ranks: int
    samples: tuple[LinkSample, ...]
    made: str
    took_s: float

    @staticmethod
    def default_path() -> Path:
        """Return the default file."""
        return env.cache_dir() / "links.json"

    @property
    def layouts(self) -> tuple[tuple[int, int], ...]:
        """(hosts, ranks per host) of the measured groups."""
        return tuple(sorted({(sample.hosts, sample.ranks) for sample in self.samples}))

    def route_choices(self, hosts: int, ranks: int, fixed: str, usable: Sequence[str]) -> RouteChoices | None:
        """Return the transports for an axis over `hosts` hosts with `ranks` ranks on each.

        Return None if `fixed` was not measured for this axis.

        Args:
            fixed: the default transport. Another one must take less than 0.9 of its time.
            usable: transports to choose from.
        """
        of: defaultdict[tuple[str, str], list[LinkSample]] = defaultdict(list)
        for one in self.samples:
            if (one.hosts, one.ranks) == (hosts, ranks) and one.op in OPS and one.transport in usable:
                of[one.op, one.transport].append(one)
        if not any(transport == fixed for _, transport in of):
            return None
        best: dict[str, list[tuple[int, str]]] = {}
        gains: list[str] = []
        for op in (op for op in OPS if (op, fixed) in of):
            found = _best({way: samples for (name, way), samples in of.items() if name == op}, fixed)
            best[op] = [(least, transport) for least, transport, _ in found]
            for (least, way, share), after in zip(found, [*found[1:], None], strict=True):
                if way != fixed:  # "all_reduce below 181 KiB by gloo exchange (0.59 of the time)"
                    start = f" from {format_bytes(least)}" if least else ""
                    end = f" below {format_bytes(after[0])}" if after else ""
                    gains.append(f"{op}{start}{end} by {way} ({share:.2f} of the time)")
        laws: dict[str, dict[str, tuple[float, ...]]] = {op: {} for op in best}
        for (op, transport), samples in of.items():
            if op in laws:
                laws[op][transport] = fit_transfer([one.size for one in samples], [one.seconds for one in samples])
        return RouteChoices(best=best, laws=laws, gains=tuple(gains))

    def to_text(self) -> str:
        """Return the file's text, with one sample per line."""
        head = {"weft_links": VERSION, "machine": asdict(self.machine), "hosts": self.hosts, "ranks": self.ranks,
                "made": self.made, "took_s": round(self.took_s, 1)}  # fmt: skip
        return file_text(head, samples=self.samples)

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ConfigError: if it cannot be written.
        """
        write_atomic(path, self.to_text())

    @classmethod
    def load(cls, path: Path | str) -> LinkProfile:
        """Read a profile.

        Raises:
            ConfigError: if the file is unreadable or invalid; the message names the file and the first error.
        """
        remedy = "Measure the links again with: weft calibrate --hosts"
        return read_file(path, "launch.links", f"links={path}", cls._read, remedy)

    @classmethod
    def _read(cls, table: Mapping[str, Any]) -> LinkProfile:
        expect_keys(table, "weft_links", VERSION, {"machine", "hosts", "ranks", "made", "took_s", "samples"})
        samples = tuple(read_row(LinkSample, each) for each in table["samples"])
        if bad := next((each for each in samples if not 0 < each.seconds < 1e6 or each.size < 1), None):
            raise ValueError(f"sample {bad.op} of {bad.size} bytes: seconds={bad.seconds} is not a time")
        return cls(machine=read_row(Machine, table["machine"]), hosts=int(table["hosts"]), ranks=int(table["ranks"]),
                   samples=samples, made=str(table["made"]), took_s=float(table["took_s"]))  # fmt: skip


def _best(ways: Mapping[str, Sequence[LinkSample]], fixed: str) -> list[tuple[int, str, float]]:
    """Return (minimum bytes, transport, smallest share of the default's time) for each range with one transport.

    The boundary between two measured sizes is their geometric mean. Far beyond the largest measured size, the default
    transport is used, since no measurement applies.
    """
    seconds = {way: {one.size: one.seconds for one in samples} for way, samples in ways.items()}
    found: list[tuple[int, str, float]] = []
    before = 0
    for size in sorted(seconds[fixed]):
        at = {way: times[size] / seconds[fixed][size] for way, times in seconds.items() if size in times}
        way = min(at, key=lambda name: at[name])
        way = way if at[way] < BETTER else fixed
        if found and found[-1][1] == way:
            found[-1] = (*found[-1][:2], min(found[-1][2], at[way]))
        else:
            found.append((math.isqrt(before * size), way, at[way]))
        before = size
    return [*found, *([(_REACH * before, fixed, 1.0)] if found and found[-1][1] != fixed else [])]


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return non-negative coefficients of 1, sqrt(bytes) and bytes that fit times (s).

    The sum of the squared relative errors is minimal.
    """
    size, wanted = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    rows = np.stack([np.ones_like(size), np.sqrt(size), size], axis=1) / wanted[:, None]
    scale = rows.max(axis=0)
    best, least = np.zeros(3), np.inf
    # The best of all subsets of terms whose unrestricted solution is not negative.
    for count in range(1, min(3, len(size)) + 1):
        for chosen in map(list, itertools.combinations(range(3), count)):
            part = rows[:, chosen] / scale[chosen]
            solve: Any = np.linalg.lstsq  # its stub has no element types
            found: NDArray[np.float64] = solve(part, np.ones(len(rows)), rcond=None)[0]
            left = float(np.square(part @ found - 1).sum())
            if float(found.min()) >= 0 and left < least - 1e-12:
                best, least = np.zeros(3), left
                best[chosen] = found / scale[chosen]
    return tuple(map(float, best))
