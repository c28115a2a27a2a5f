"""Detection of slow ranks, for which the others wait, by comparing the same steps over ranks with the same work.

A rank's own work is its computing, reading and preparing. Its waits for others are excluded, or all ranks would look
the same. Each step is compared to the median of the rank's peers: the ranks with the same pipeline stage. A rank
without peers is compared to its past, corrected for changes that are common to all ranks. A single slow step is not
enough: medians and quartiles over the last steps decide, relative to the normal variation between ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from weft.units import format_seconds

#: Number of recent steps for a decision, and the minimum.
_WINDOW, _LEAST = 16, 6
#: A rank becomes slow if its time relative to its peers is above SLOW, and recovers if it is below OVER.
SLOW, OVER = 1.10, 1.05
#: With at least _MANY ranks, their variation is measured, and a slow rank must exceed _DEVIATIONS deviations.
_MANY, _DEVIATIONS = 5, 5.0
#: Smaller differences in seconds per step are ignored.
_WORTH_S = 0.001
#: Maximum number of a rank's steps kept until all its peers have reported them.
_KEPT = 64
#: Maximum and minimum number of past steps for the comparison of a rank without peers.
_PAST, _ENOUGH_PAST = 240, 24
#: Metrics that may explain slowness: (metric, whether low values are the problem, factor to the others' median, text).
_CLUES = (
    ("gpu.throttled", False, 1.0, "its GPU is slowed down by heat or its power brake"),
    ("gpu.sm_clock", True, 0.95, "its GPU's clock is {0:.2f} GHz, theirs {1:.2f} GHz"),
    ("gpu.temperature", False, 1.08, "its GPU is at {0:.0f} C, theirs at {1:.0f} C"),
    ("process.cpu", True, 0.85, "its process gets {0:.2g} CPU cores, theirs {1:.2g}"),
)
_SCALE = {"gpu.sm_clock": 1e-9}


class Advisor(Protocol):
    """Proposes what to do about a slow rank.

    Attributes:
        since: steps up to this one are not compared, because the ranks had other work in them.
    """

    since: int

    def advise(self, step: int, seconds: Sequence[float | None]) -> Mapping[str, object]:
        """Return fields for the event, from the seconds of own work per step by rank.

        "advice" is added to the event's text.
        """
        ...


@dataclass(slots=True)
class _OneRank:
    """State of a rank. `own` is seconds by step until all peers report it. `ratios` are relative to its peers."""

    own: dict[int, float] = field(default_factory=dict)
    newest: int = 0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    peers_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    past: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    since: int | None = None  # first slow step, or None if it is not slow


class StragglerWatch:
    """Reads all ranks' reports and returns an event once when a rank becomes slow, and when it recovers.

    Args:
        groups: a number for each rank that is equal for ranks that do the same work.
        advisor: proposes what to do about a slow rank; None for no proposals.
    """

    def __init__(self, groups: Sequence[int], advisor: Advisor | None = None):
        self._advisor, self._since = advisor, 0
        self._groups = [[rank for rank, one in enumerate(groups) if one == group] for group in dict.fromkeys(groups)]
        self._group_of = groups
        self._ranks = [_OneRank() for _ in groups]

    def observe(self, reports: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
        """Take the newest report of each rank, and return a "slow_rank" event per rank that became slow or recovered.

        Args:
            reports: reports of all ranks, in order; {} for a silent rank.
        """
        if self._advisor is not None and self._advisor.since > self._since:
            self._since = self._advisor.since
            self._ranks = [_OneRank(newest=self._since) for _ in self._ranks]
        for rank, report in zip(self._ranks, reports, strict=True):
            _take(rank, report)
        heard = [bool(report) for report in reports]
        for group in self._groups:
            if len(group) > 1:
                self._compare(group, heard)
        alone = [group[0] for group in self._groups if len(group) == 1]
        if len(alone) > 1:
            self._compare_with_past(alone, heard)
        lags = [self.lag(rank) for rank in range(len(self._ranks))]
        events: list[dict[str, object]] = []
        for group in self._groups:
            bound = _bound([found for rank in group if (found := lags[rank]) is not None])
            for rank in group:
                lag = lags[rank]
                if lag is not None and (event := self._judge(rank, lag, bound, reports)) is not None:
                    events.append(event)
        return events

    def lag(self, rank: int) -> float | None:
        """Return the median ratio of a rank's time to its peers' time over the last steps, or None with too few steps.

        The times exclude waiting for other ranks. A rank without peers is compared to its usual time.
        """
        ratios = self._ranks[rank].ratios
        return statistics.median(ratios) if len(ratios) >= _LEAST else None

    def _common(self, group: Sequence[int], heard: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Return the ranks of a group that send reports, and the steps that all of them have reported."""
        members = [rank for rank in group if heard[rank] and self._ranks[rank].own]
        if len(members) < 2:
            return members, []
        steps = set(self._ranks[members[0]].own)
        for rank in members[1:]:
            steps &= self._ranks[rank].own.keys()
        return members, sorted(steps)

    def _compare(self, group: Sequence[int], heard: Sequence[bool]) -> None:
        members, steps = self._common(group, heard)
        for step in steps:
            own = {rank: self._ranks[rank].own.pop(step) for rank in members}
            ordered = sorted(own.values())
            for rank, seconds in own.items():
                _note(self._ranks[rank], seconds, median_without(ordered, seconds))

    def _compare_with_past(self, ranks: Sequence[int], heard: Sequence[bool]) -> None:
        members, steps = self._common(ranks, heard)
        for step in steps:
            own = {rank: self._ranks[rank].own.pop(step) for rank in members}
            usual = {rank: statistics.median(self._ranks[rank].past or [seconds]) for rank, seconds in own.items()}
            if min(len(self._ranks[rank].past) for rank in members) >= _ENOUGH_PAST and min(usual.values()) > 0:
                ordered = sorted(own[rank] / usual[rank] for rank in members)
                for rank, seconds in own.items():
                    # Factor of this step on all ranks: a longer sequence takes longer on all of them.
                    common = median_without(ordered, seconds / usual[rank])
                    _note(self._ranks[rank], seconds, usual[rank] * common)
            for rank, seconds in own.items():
                if self._ranks[rank].since is None:  # slow steps are not added to its usual times
                    self._ranks[rank].past.append(seconds)

    def _judge(
        self, rank: int, lag: float, bound: float, reports: Sequence[Mapping[str, Any]]
    ) -> dict[str, object] | None:
        one = self._ranks[rank]
        if one.since is not None:
            if lag >= OVER:
                return None
            one.since = None
            text = f"rank {rank} keeps pace with its peers again"
            return {"event": "slow_rank", "state": "ended", "rank": rank, "step": one.newest, "text": text}
        last = list(one.ratios)[-_LEAST:]
        low = statistics.quantiles(one.ratios, n=4)[0]
        excess_s = statistics.median(one.own_s) - statistics.median(one.peers_s)
        if not ((lag > bound and low > (1 + bound) / 2) or min(last) > bound) or excess_s < _WORTH_S:
            return None
        one.since = one.newest
        lag = max(lag, statistics.median(last))
        part, text = self._words(rank, lag, reports)
        advice = {} if self._advisor is None else dict(self._advisor.advise(one.newest, self._seconds()))
        if more := advice.pop("advice", ""):
            text = f"{text}; {more}"
        return {"event": "slow_rank", "state": "fired", "rank": rank, "step": one.newest, "lag": round(lag, 3),
                "part": part, "text": text, **advice}  # fmt: skip

    def _seconds(self) -> list[float | None]:
        """Return the median seconds of own work of each rank's last steps."""
        return [statistics.median(list(one.own_s)[-_LEAST:]) if one.own_s else None for one in self._ranks]

    def _words(self, rank: int, lag: float, reports: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        one = self._ranks[rank]
        own_s, peers_s = statistics.median(list(one.own_s)[-_LEAST:]), statistics.median(list(one.peers_s)[-_LEAST:])
        peers = [other for other in range(len(reports)) if other != rank and reports[other]
                 and self._group_of[other] == self._group_of[rank]]  # fmt: skip
        baseline = "its peers' median" if peers else "its usual time"
        text = (
            f"rank {rank} is slow, and the others wait for it: its own work takes {format_seconds(own_s)} a step, "
            f"{lag:.2f} times {baseline} ({format_seconds(peers_s)})"
        )
        parts, theirs = _parts(reports[rank]), [_parts(reports[peer]) for peer in peers]
        excess = {
            part: seconds - statistics.median(one.get(part, 0.0) for one in theirs)
            for part, seconds in parts.items()
            if theirs
        }
        part = max(excess, key=lambda name: excess[name]) if excess else ""
        if part:
            text += f"; most of it in {part}"
        clues = list(_clues(_numbers(reports[rank].get("values")), [_numbers(reports[peer].get("values"))
                                                                    for peer in peers]))  # fmt: skip
        host = reports[rank].get("host")
        return part, "; ".join([text, *clues]) + (f" (on {host})" if host else "")


def _take(rank: _OneRank, report: Mapping[str, Any]) -> None:
    """Add the steps that earlier reports of this rank did not contain."""
    for text, micro in _numbers(_pace(report).get("steps")).items():
        step = int(text) if text.isdigit() else 0
        if step > rank.newest:
            rank.own[step] = micro / 1e6
    rank.newest = max(rank.own, default=rank.newest) if rank.own else rank.newest
    for step in sorted(rank.own)[:-_KEPT]:
        del rank.own[step]


def _note(rank: _OneRank, own_s: float, peers_s: float) -> None:
    if peers_s > 0:
        rank.ratios.append(own_s / peers_s)
        rank.own_s.append(own_s)
        rank.peers_s.append(peers_s)


def _bound(lags: Sequence[float]) -> float:
    """Return the ratio above which a rank is slow, given the variation between ranks with the same work."""
    if len(lags) < _MANY:
        return SLOW
    middle = statistics.median(lags)
    spread = 1.4826 * statistics.median(abs(lag - middle) for lag in lags)
    return max(SLOW, middle + _DEVIATIONS * spread)


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted numbers without one of them, `value`."""
    place = bisect_left(ordered, value)
    size = len(ordered) - 1
    at = [(size - 1) // 2, size // 2]
    low, high = (ordered[index if index < place else index + 1] for index in at)
    return (low + high) / 2


def _clues(own: Mapping[str, float], peers: Sequence[Mapping[str, float]]) -> list[str]:
    found: list[str] = []
    for name, is_low, factor, words in _CLUES:
        others = [one[name] for one in peers if name in one]
        if name not in own or not others:
            continue
        middle, value = statistics.median(others), own[name]
        if (value < factor * middle) if is_low else (value > factor * middle and value > 0):
            scale = _SCALE.get(name, 1.0)
            found.append(words.format(value * scale, middle * scale))
    return found


def _pace(report: Mapping[str, Any]) -> Mapping[str, Any]:
    found = report.get("pace")
    return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}


def _parts(report: Mapping[str, Any]) -> dict[str, float]:
    return _numbers(_pace(report).get("parts"))


def _numbers(table: object) -> dict[str, float]:
    """Return the numbers of a table. A report may be damaged."""
    if not isinstance(table, Mapping):
        return {}
    known = cast(Mapping[Any, Any], table)
    return {str(key): float(one) for key, one in known.items() if isinstance(one, int | float)}
