"""What ranks say of themselves when they have stood still for long, and the one sentence that is made of it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.mesh import Wait
from weft.units import format_seconds

#: A sentence names at most so many ranks.
_MOST_NAMED = 8
#: Ranks whose places one report gathers.
_MOST_ASKED = 1024
_NOT_USER = ("/torch/", "/weft/", "<frozen", "/lib/python")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands. since: seconds of the epoch.

    waits_for: a collective in words, "" where the rank does something else. ranks: who takes part in it. late: who is
    known to hold it up. phase: work that is under way. may_take_long: nobody need worry about it. frame: the Python
    line it is at. in_step: it trains.
    """

    rank: int
    since: float
    waits_for: str = ""
    ranks: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    phase: str = ""
    may_take_long: bool = False
    frame: str = ""
    in_step: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Standing:
        fields = json.loads(text)
        return replace(cls(**fields), ranks=tuple(fields["ranks"]), late=tuple(fields["late"]))


#: Asks for another rank's record; None where it has left none.
Ask = Callable[[int], Standing | None]


@dataclass(frozen=True, slots=True)
class HangReport:
    """text: for people. culprits: ranks that the others wait for. is_calm: all of them do work that takes its time.

    standing: of the ranks that took part, (which ones, where they stand in words), alike ones together.
    """

    text: str
    culprits: tuple[int, ...]
    is_calm: bool
    standing: tuple[tuple[tuple[int, ...], str], ...] = ()


def hang_event(state: str, found: HangReport) -> dict[str, object]:
    """Return a report as an event. state: "fired", or "ended" once all go on."""
    event: dict[str, object] = {"event": "hang", "state": state, "ranks": found.culprits[:_MOST_ASKED]}
    if found.standing:
        event["standing"] = [[list(ranks), where] for ranks, where in found.standing]
    return {**event, "text": found.text}


def find_culprits(start: Standing, ask: Ask) -> dict[int, Standing | None]:
    """Who does not wait for anybody, and is waited for by `start`, or by a rank that it waits for, and so on.

    Their records are None where they left no word. Empty when the ranks wait for each other in a circle.
    """
    known: dict[int, Standing | None] = {start.rank: start}
    found: dict[int, Standing | None] = {}
    open_ends = [start]
    while open_ends:
        waiter = open_ends.pop()
        for rank in waiter.late or waiter.ranks:
            if rank in known:
                continue
            known[rank] = record = ask(rank)
            if record is not None and record.waits_for:
                open_ends.append(record)
            else:
                found[rank] = record
    if start.waits_for == "":
        found[start.rank] = start
    return dict(sorted(found.items()))


def report(
    waiter: Standing, ask: Ask, process_of: Callable[[int], str], *, now: float, rest: str, zero: int
) -> HangReport:
    """What `waiter` and those it waits for add up to.

    process_of: what this machine knows of another rank's process, as a sentence. rest: until when the waiting goes on,
    and where stacks are, as sentences.
    """
    culprits = find_culprits(waiter, ask)
    since = f"since {time.strftime('%H:%M:%S', time.localtime(waiter.since))} ({format_seconds(now - waiter.since)})"
    if not culprits:
        others = [record for rank in waiter.ranks if (record := ask(rank)) is not None and rank != waiter.rank]
        each = ", ".join(f"rank {one.rank} in {one.waits_for}" for one in [waiter, *others[:_MOST_NAMED]])
        return HangReport(f"the ranks wait for each other {since}: {each}. {rest}", (), False, _alike(waiter, ask))
    names = _names(culprits)
    if all(record is not None and record.may_take_long for record in culprits.values()):
        what = "; ".join(f"rank {rank} {record.phase}" for rank, record in culprits.items() if record is not None)
        return HangReport(
            f"{what}: rank {waiter.rank} waits for it in {waiter.waits_for} {since}.", tuple(culprits), True
        )
    words = [f"waiting for {names} {since}: rank {waiter.rank} is in {waiter.waits_for}."]
    for rank, record in list(culprits.items())[:_MOST_NAMED]:
        if record is None:
            words.append(process_of(rank))
        else:
            words.append(f"Rank {rank} {record.phase or 'calls no collective'}, at {record.frame}.")
    if zero == 3 and not waiter.in_step and "all_gather" in waiter.waits_for:
        words.append(
            f"Under zero=3 every rank must take part in each forward, in evaluation too: has rank {waiter.rank} called "
            f"the model alone?"
        )
    return HangReport(" ".join([*words, rest]), tuple(culprits), False, _alike(waiter, ask))


def _alike(waiter: Standing, ask: Ask) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Where each rank of a wait stands, and each that those wait for; ranks that stand alike together."""
    places: dict[str, list[int]] = {}
    known: set[int] = set()
    open_ends = [waiter.rank, *waiter.ranks]
    while open_ends and len(known) < _MOST_ASKED:
        rank = open_ends.pop(0)
        if rank in known:
            continue
        known.add(rank)
        record = waiter if rank == waiter.rank else ask(rank)
        if record is None:
            where = "has left no word"
        elif record.waits_for:
            where = f"waits in {record.waits_for}, at {record.frame}"
            open_ends += [*record.late, *record.ranks]
        else:
            where = f"{record.phase or 'calls no collective'}, at {record.frame}"
        places.setdefault(where, []).append(rank)
    return tuple((tuple(sorted(ranks)), where) for where, ranks in places.items())


def _names(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def stand(rank: int, since: float, wait: Wait | None, phases: list[tuple[str, bool]], in_step: bool) -> Standing:
    """This rank's record."""
    waits_for, ranks = wait.where() if wait is not None else ("", ())
    late = wait.late() if wait is not None else ()
    phase, may_take_long = phases[-1] if phases else ("", False)
    return Standing(rank, since, waits_for, ranks, late, phase, may_take_long, main_frame(), in_step)


def main_frame() -> str:
    """The line of the user's own code that the main thread is at: 'train.py:40 in evaluate'; any, where it has none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]  # documented
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_USER):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no Python line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def process_state(rank: int, pid: int | None) -> str:
    """What this machine knows of a rank's process. pid: None where it runs on another machine, or is not known."""
    if pid is None:
        return f"Rank {rank} does not respond; it is on another machine."
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"Process {pid} of rank {rank} has ended."
    if state in "Tt":
        return f"Process {pid} of rank {rank} is stopped; `kill -CONT {pid}` resumes it."
    if state in "ZX":
        return f"Process {pid} of rank {rank} has ended."
    if state == "D":
        return f"Process {pid} of rank {rank} waits for a disk or a device (state D)."
    return f"Process {pid} of rank {rank} is running, and has not reached it yet."


def unfinished_on_device(traces: bytes, axis_of: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[str, tuple[int, ...]]:
    """The oldest collective that a device has not finished, by torch's flight recorder; ("", ()) where there is none.

    traces: `_dump_nccl_trace_json`. axis_of: torch's name of a group -> (axis, its global ranks).
    """
    try:
        entries = json.loads(traces).get("entries", [])
    except ValueError:
        return "", ()
    for entry in entries:
        if entry.get("state") in ("scheduled", "started"):
            name, ranks = axis_of.get(entry["process_group"][0], (entry["process_group"][-1], ()))
            return f"{entry['profiling_name'].rpartition(':')[2].strip('_')} over {name}", ranks
    return "", ()
