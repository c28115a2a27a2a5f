"""Detection and report of hangs: each rank records its status, and one rank reports the cause."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from weft.comm.heartbeat import Heartbeat, Wait
from weft.comm.mesh import LIMIT_S, Axis, Mesh
from weft.comm.private_torch import connect_store, default_store, nccl_trace
from weft.comm.store import StoreKey, store_key
from weft.comm.transports.shared_memory import host_mark
from weft.devices import access
from weft.private_torch import Store
from weft.units import format_seconds

#: Maximum number of ranks that a sentence names.
_MOST_NAMED = 8
#: Maximum number of ranks whose status a report reads.
_MOST_ASKED = 1024
_NOT_USER = ("/torch/", "/weft/", "<frozen", "/lib/python")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of a rank that makes no progress.

    Attributes:
        since: start of the time without progress, in seconds since the epoch.
        waits_for: the collective in which the rank waits, or "".
        ranks, late: members of that collective, and the members identified as late.
        phase: the work in progress.
        may_take_long: True if a long duration is normal.
        frame: the current Python line.
        in_step: True during a training step.
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
    def from_text(cls, text: str) -> RankStatus:
        fields = json.loads(text)
        return replace(cls(**fields), ranks=tuple(fields["ranks"]), late=tuple(fields["late"]))


#: Reads another rank's status; returns None if it has recorded none.
Ask = Callable[[int], RankStatus | None]


@dataclass(frozen=True, slots=True)
class HangReport:
    """Result of a hang analysis.

    Attributes:
        text: message for the user.
        culprits: the ranks that the others wait for.
        is_calm: True if all culprits do work that may take long.
        standing: (ranks, status) of the ranks involved, with ranks of the same status in one entry.
    """

    text: str
    culprits: tuple[int, ...]
    is_calm: bool
    standing: tuple[tuple[tuple[int, ...], str], ...] = ()


def hang_event(state: str, found: HangReport) -> dict[str, object]:
    """Return a report as an event, a dict that can be written as JSON."""
    event: dict[str, object] = {"event": "hang", "state": state, "ranks": found.culprits[:_MOST_ASKED]}
    if found.standing:
        event["standing"] = [[list(ranks), where] for ranks, where in found.standing]
    return {**event, "text": found.text}


def find_culprits(start: RankStatus, ask: Ask) -> dict[int, RankStatus | None]:
    """Find the ranks that wait for no rank and that `start` waits for, directly or through other ranks.

    If `start` waits for no rank, it is the result. The status is None for a rank that recorded none. The result is
    empty if the ranks wait for each other in a cycle.
    """
    known: dict[int, RankStatus | None] = {start.rank: start}
    found: dict[int, RankStatus | None] = {}
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
    waiter: RankStatus, ask: Ask, process_of: Callable[[int], str], *, now: float, rest: str, zero: int
) -> HangReport:
    """Build the report of `waiter` and the ranks that it waits for.

    Args:
        process_of: returns a sentence on the state of another rank's process, if this machine can determine it.
        now: current time in seconds since the epoch.
        rest: sentences on the end of the wait and the location of the stacks.
        zero: ZeRO stage of the plan.
    """
    culprits = find_culprits(waiter, ask)
    since = f"since {time.strftime('%H:%M:%S', time.localtime(waiter.since))} ({format_seconds(now - waiter.since)})"
    if not culprits:
        others = [record for rank in waiter.ranks if (record := ask(rank)) is not None and rank != waiter.rank]
        each = ", ".join(f"rank {one.rank} in {one.waits_for}" for one in [waiter, *others[:_MOST_NAMED]])
        return HangReport(
            f"the ranks wait for each other {since}: {each}. {rest}", (), False, _grouped_by_wait(waiter, ask)
        )
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
    return HangReport(" ".join([*words, rest]), tuple(culprits), False, _grouped_by_wait(waiter, ask))


def _grouped_by_wait(waiter: RankStatus, ask: Ask) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return the status of each rank in a wait and of the ranks that those wait for, grouped by status."""
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
            where = "has sent no message"
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


def stand(rank: int, since: float, wait: Wait | None, phases: list[tuple[str, bool]], in_step: bool) -> RankStatus:
    waits_for, ranks = wait.where() if wait is not None else ("", ())
    late = wait.late() if wait is not None else ()
    phase, may_take_long = phases[-1] if phases else ("", False)
    return RankStatus(rank, since, waits_for, ranks, late, phase, may_take_long, main_frame(), in_step)


def main_frame() -> str:
    """Return the main thread's line in user code, such as 'train.py:40 in evaluate', or else its innermost line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]  # documented
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_USER):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no Python line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def process_state(rank: int, pid: int | None) -> str:
    """Return a sentence on the state of a rank's process. pid: None if it is unknown or on another machine."""
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
    """Return (description, global ranks) of the oldest collective that a device has not finished.

    Return ("", ()) without one, or if `traces` is not JSON.

    Args:
        traces: contents of torch's flight recorder (`_dump_nccl_trace_json`).
        axis_of: (axis, its global ranks), by torch's name of the process group.
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


# A thread on each rank that detects a lack of progress and has one rank report the cause.

#: Limit (s) if step times are unknown, and for work that may take long.
WARN_AFTER_S = 60.0
#: A wait of this many usual steps is a hang, but not before this many seconds.
_STEPS_OF_A_HANG, _LEAST_S = 20.0, 10.0
#: Ticks between `warn_after_s` and the report, in which all ranks record their status.
_GRACE_TICKS = 3
_STORE_TIMEOUT = datetime.timedelta(seconds=10)
_PREFIX = "weft/watch/"
#: Store keys set while a wait is reported: the reporting rank, the waiting rank, a request to dump stacks.
_TELLER, _WAITER, _ALARM = f"{_PREFIX}teller", f"{_PREFIX}waiter", f"{_PREFIX}alarm"


@dataclass(slots=True)
class _Standstill:
    """Period without progress.

    Attributes:
        since: its start, in seconds since the epoch.
        seconds: its duration, without time in which this process was stopped.
        said: status that this rank recorded, or None.
        report: report that this rank made, or None.
        is_teller: True if this rank was chosen to report.
        dumped: True if this rank has printed its stacks.
    """

    since: float
    seconds: float = 0.0
    said: RankStatus | None = None
    report: HangReport | None = None
    is_teller: bool = False
    dumped: bool = False


class Watch(threading.Thread):
    """Watches one rank until `close`. A later watch of the same process takes over the watched heartbeats.

    It does nothing for a single rank, or if `warn_after_s` is not below `limit_s`.

    Args:
        mesh: the rank's mesh.
        tell: called with lines for the user.
        warn_after_s: seconds without progress before a warning; None for 20 usual steps, at least 10 s, or a minute if
            step times are unknown, and at most half of `limit_s`.
        limit_s: the group's timeout in seconds.
        limit_name: name of the setting that has the timeout.
        stacks: stream for Python stacks; None for stderr.
        where_stacks: text that directs the user to the stacks.
        owns_process: True if faulthandler's timer is free for use. Stacks are then dumped even if the interpreter is
            stuck.
        on_report: on the reporting rank, called with "fired" or "ended" and the report.
    """

    def __init__(
        self,
        mesh: Mesh,
        tell: Callable[[str], None],
        *,
        warn_after_s: float | None = WARN_AFTER_S,
        limit_s: float = LIMIT_S,
        limit_name: str = "timeout",
        stacks: TextIO | None = None,
        where_stacks: str = "the ranks' stderr",
        owns_process: bool = False,
        on_report: Callable[[str, HangReport], None] | None = None,
    ):
        super().__init__(name="weft-watch", daemon=True)
        self._rank, self._zero = mesh.rank, mesh.plan.zero
        self._print_line, self._on_report = tell, on_report
        self._follows_steps = warn_after_s is None
        warn_after_s = min(WARN_AFTER_S, limit_s / 2) if warn_after_s is None else warn_after_s
        self._warn_after_s, self._limit = warn_after_s, (limit_s, limit_name)
        self._stacks = stacks or sys.__stderr__
        self._where_stacks, self._owns_process = where_stacks, owns_process
        self._tick_s = min(1.0, warn_after_s / 4)
        self._pulses: list[Heartbeat] = [mesh.pulse]
        self._axes: Callable[[], list[Axis]] = mesh.built_axes if access.collectives_overlap(mesh.device) else list
        self._end = threading.Event()
        self._store: Store | None = None
        self._key: StoreKey | None = None
        self._armed = 0.0
        self._still = _Standstill(time.time())
        self._looked = time.monotonic()
        self._seen: tuple[object, ...] = ()
        for other in threading.enumerate():
            if isinstance(other, Watch):
                self._pulses += other.close()
        if dist.is_initialized() and mesh.world_size > 1 and warn_after_s < limit_s:
            place = f"{host_mark()[0].hex()} {os.getpid()}"
            self._key = store_key()
            self._put(default_store(), f"{_PREFIX}place/{self._rank}", place)
            self._put_off_timer()  # here: the thread may not get the interpreter before it is stuck
            self.start()

    def close(self) -> list[Heartbeat]:
        """Stop watching and return the watched heartbeats."""
        self._end.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(2 * self._tick_s)
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
            self._armed = 0.0
        self._store = None
        return self._pulses

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Watch until `close`. This is the thread's main function."""
        while not self._end.wait(self._tick_s):
            self._put_off_timer()
            try:
                self._look()
            except (RuntimeError, OSError, ValueError) as error:
                # The store is lost or hangs: report with local information only.
                self._report_lost_store(error)

    def _put_off_timer(self) -> None:
        """Postpone faulthandler's stack dump, which is needed only if a stuck interpreter also stops this thread."""
        now = time.monotonic()
        if self._owns_process and self._stacks is not None and now - self._armed > self._warn_after_s / 4:
            faulthandler.dump_traceback_later(2 * self._warn_after_s, file=self._stacks)
            self._armed = now

    def _look(self) -> None:
        seen = tuple((pulse.moved, id(pulse.waiting)) for pulse in self._pulses)
        # Do not count time in which this process was stopped or the machine slept.
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, 2 * self._tick_s), now
        if seen != self._seen:
            self._seen = seen
            ended, self._still = self._still, _Standstill(time.time())
            if ended.said is not None:
                self._go_on(ended, self._still.since - ended.since)
            return
        self._still.seconds += passed_s
        if self._still.seconds >= self._deadline_s() - _GRACE_TICKS * self._tick_s:
            self._stand_still()

    def _deadline_s(self) -> float:
        usual = max((pulse.usual_s() for pulse in self._pulses), default=0.0) if self._follows_steps else 0.0
        return min(max(_LEAST_S, _STEPS_OF_A_HANG * usual), self._limit[0] / 2) if usual else self._warn_after_s

    def _stand_still(self) -> None:
        """Record this rank's status, report if this rank is the reporter, and dump stacks if requested."""
        store = self._open()
        if self._still.said is None:
            self._still.said = self._status()
            self._put(store, f"{_PREFIX}{self._rank}", self._still.said.to_text())
            if self._still.said.waits_for:
                self._put(store, _WAITER, str(self._rank))
        if self._still.report is None and self._is_reporter(store):
            self._report_hang(store)
        if not self._still.dumped and self._read(_ALARM):
            self._dump()

    def _is_reporter(self, store: Store) -> bool:
        """Return True if this rank reports: rank 0, which has the terminal, or else the first waiting rank."""
        assert self._still.said is not None
        over_s = self._still.seconds - self._deadline_s()
        if not self._still.is_teller:
            waits = bool(self._still.said.waits_for) and over_s >= _GRACE_TICKS * self._tick_s
            may = bool(self._read(_WAITER)) if self._rank == 0 else waits
            if may:  # and no other rank reports yet; an unsigned value in the store is ignored
                assert self._key is not None
                signed = self._key.sign(_TELLER, str(self._rank))
                teller = self._key.opened(_TELLER, store.compare_set(_TELLER, "", signed.decode()))
                self._still.is_teller = teller is None or teller.decode() == str(self._rank)
        return self._still.is_teller and over_s >= 0

    def _report_hang(self, store: Store) -> None:
        assert self._still.said is not None
        waiter = self._still.said
        if not waiter.waits_for:
            rank = self._read(_WAITER)
            if not rank:
                return  # it made progress in the meantime
            waiter = self._ask(int(rank)) or waiter
        found = self._report(waiter, self._ask, self._process_of)
        if found.is_calm and self._still.seconds < self._warn_after_s:
            return  # a save may take long
        self._still.report = found
        self._put(store, _ALARM, "1")
        self._print_line(found.text)
        self._hand_on("fired", found)

    def _hand_on(self, state: str, found: HangReport) -> None:
        if self._on_report is not None:
            self._on_report(state, found)

    def _report(
        self, waiter: RankStatus, ask: Callable[[int], RankStatus | None], of: Callable[[int], str]
    ) -> HangReport:
        end = time.strftime("%H:%M:%S", time.localtime(waiter.since + self._limit[0]))
        rest = f"The wait ends at {end} ({self._limit[1]}); Python stacks are in {self._where_stacks}."
        usual = max(one.usual_s() for one in self._pulses)
        planned = max(one.planned_s for one in self._pulses)
        if usual:
            beside = f" (planned: {format_seconds(planned)})" if planned else ""
            rest = f"A step usually takes {format_seconds(usual)}{beside}. {rest}"
        return report(waiter, ask, of, now=time.time(), rest=rest, zero=self._zero)

    def _report_lost_store(self, error: Exception) -> None:
        """Drop the store, which does not answer. Report once from local information if this rank waits for others."""
        self._store = None
        if (
            self._still.said is None
            or not self._still.said.waits_for
            or self._still.report is not None
            or self._end.is_set()
        ):
            return
        self._still.report = self._report(
            self._still.said,
            lambda _: None,
            lambda rank: f"The state of rank {rank} is unknown: the ranks' store does not answer.",
        )
        self._print_line(self._still.report.text)
        self._hand_on("fired", self._still.report)
        self._dump()

    def _go_on(self, ended: _Standstill, seconds: float) -> None:
        told = ended.report
        if told is not None and not told.is_calm:
            names = ", ".join(f"rank {rank}" for rank in told.culprits[:8]) or "the ranks"
            verb = "continue" if len(told.culprits) != 1 else "continues"
            text = f"{names} {verb} after {format_seconds(seconds)}."
            self._print_line(text)
            self._hand_on("ended", replace(told, text=text, standing=()))
        store = self._open()
        store.delete_key(f"{_PREFIX}{self._rank}")
        if ended.is_teller:
            for key in (_ALARM, _WAITER, _TELLER):
                store.delete_key(key)

    def _status(self) -> RankStatus:
        wait: Wait | None = next((pulse.waiting for pulse in self._pulses if pulse.waiting is not None), None)
        phases = [phase for pulse in self._pulses for phase in pulse.phases]
        own = stand(self._rank, self._still.since, wait, phases, any(pulse.in_step for pulse in self._pulses))
        if own.waits_for or not (axes := self._axes()):
            return own
        # A device runs behind the host: this rank waits for the collective that the device has not finished.
        dump = nccl_trace()
        names = {str(axis.group.group_name): (axis.label, axis.ranks) for axis in axes if axis.group is not None}
        what, ranks = unfinished_on_device(dump(True, True), names) if dump is not None else ("", ())
        return stand(self._rank, self._still.since, _OnDevice(what, ranks), phases, own.in_step) if what else own

    def _ask(self, rank: int) -> RankStatus | None:
        text = self._read(f"{_PREFIX}{rank}")
        return RankStatus.from_text(text) if text else None

    def _process_of(self, rank: int) -> str:
        host, _, pid = self._read(f"{_PREFIX}place/{rank}").partition(" ")
        return process_state(rank, int(pid) if pid and host == host_mark()[0].hex() else None)

    def _read(self, key: str) -> str:
        """Return the text that a rank stored under a key, or "" if there is no signed value."""
        store = self._open()
        assert self._key is not None
        return (self._key.opened(key, store.get(key)) or b"").decode() if store.check([key]) else ""

    def _put(self, store: Store, key: str, text: str) -> None:
        assert self._key is not None
        store.set(key, self._key.sign(key, text).decode())

    def _open(self) -> Store:
        """Return this thread's store connection. The main thread may be blocked on the other one."""
        if self._store is None:
            self._store = connect_store(_STORE_TIMEOUT)
        return self._store

    def _dump(self) -> None:
        self._still.dumped = True
        if self._stacks is None or self._still.said is None:
            return
        what = (
            f"waits in {self._still.said.waits_for}"
            if self._still.said.waits_for
            else self._still.said.phase or "calls no collective"
        )
        clock = time.strftime("%H:%M:%S", time.localtime(self._still.since))
        try:
            print(f"--- rank {self._rank} {what} since {clock}; its Python stacks: ---", file=self._stacks, flush=True)
            faulthandler.dump_traceback(self._stacks)
        except (OSError, ValueError):
            return  # a stream without a file, as in a notebook


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A collective that the device has not finished."""

    what: str
    ranks: tuple[int, ...]

    def where(self) -> tuple[str, tuple[int, ...]]:
        return self.what, self.ranks

    def late(self) -> tuple[int, ...]:
        return ()
