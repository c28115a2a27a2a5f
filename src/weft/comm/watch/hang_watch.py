"""A thread of each rank that notices when nothing moves any more, and sees to it that one rank tells why.

The thread looks about once a second at what this rank last did (`Pulse`), and speaks to nobody. Only after
`warn_after_s` of standing still does a rank write where it stands to the group's store. The first rank that waits then
reads the records of those that it waits for, and of those that they wait for, and tells who is missing; all that can
dump their Python stacks. Nothing of this ends a wait: that is the process group's timeout.

Where no time is set, the usual and the planned time of a step tell a hang from a slow step.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

import torch.distributed as dist

from weft.comm.links import host_mark
from weft.comm.private_torch import connect_store, default_store, nccl_trace
from weft.comm.watch.signed_store import StoreKey, store_key
from weft.comm.watch.standing import HangReport, Standing, process_state, report, stand, unfinished_on_device
from weft.mesh import LIMIT_S, Axis, Mesh, Pulse, Wait
from weft.private_torch import Store
from weft.units import format_seconds

#: Where steps are not known yet, and for work that may take long.
WARN_AFTER_S = 60.0
#: A wait of so many steps is a hang, though not before so many seconds.
_STEPS_OF_A_HANG, _LEAST_S = 20.0, 10.0
_STORE_TIMEOUT = datetime.timedelta(seconds=10)
_PREFIX = "weft/watch/"
#: Set while a wait is being reported: who tells, who waits, that stacks are wanted.
_TELLER, _WAITER, _ALARM = f"{_PREFIX}teller", f"{_PREFIX}waiter", f"{_PREFIX}alarm"


class Watch(threading.Thread):
    """Watches one rank; `close` ends it. A later watch of the same process takes over what this one watched.

    Args:
        mesh: of this rank.
        tell: shows a line to people.
        warn_after_s: seconds of standing still; None: 20 steps as they usually are, at least 10 s, and a minute where
            that is not known.
        limit_s: the group's timeout in seconds.
        limit_name: the setting that changes it.
        stacks: where Python stacks go; None: stderr.
        where_stacks: that place in words.
        owns_process: nobody else uses faulthandler's timer, so that stacks come even from a rank whose interpreter is
            stuck.
        on_report: on the rank that tells people, takes "fired" or "ended", and what it found.
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
        self._tell, self._on_report = tell, on_report
        self._follows_steps = warn_after_s is None
        warn_after_s = min(WARN_AFTER_S, limit_s / 2) if warn_after_s is None else warn_after_s
        self._warn_after_s, self._limit_s, self._limit_name = warn_after_s, limit_s, limit_name
        self._stacks = stacks or sys.__stderr__
        self._where_stacks = where_stacks
        self._owns_process = owns_process
        self._tick_s = min(1.0, warn_after_s / 4)
        #: The ranks need a moment to say where they stand before one of them tells people, which is after warn_after_s.
        self._grace_s = 3 * self._tick_s
        self._pulses: list[Pulse] = [mesh.pulse]
        self._axes: Callable[[], list[Axis]] = mesh.built_axes if mesh.device.type == "cuda" else list
        self._end = threading.Event()
        self._store: Store | None = None
        self._key: StoreKey | None = None
        self._armed = 0.0
        self._forget(time.time())
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

    def close(self) -> list[Pulse]:
        """Stop watching. Returns what was watched."""
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
        """Watch until `close`: the thread's own function."""
        while not self._end.wait(self._tick_s):
            self._put_off_timer()
            try:
                self._look()
            except (RuntimeError, OSError, ValueError) as error:
                # The store is gone or hangs: what is known here must do.
                self._tell_alone(error)

    def _put_off_timer(self) -> None:
        """While this thread runs, the interpreter does, and no timer of compiled code need dump the stacks."""
        now = time.monotonic()
        if self._owns_process and self._stacks is not None and now - self._armed > self._warn_after_s / 4:
            faulthandler.dump_traceback_later(2 * self._warn_after_s, file=self._stacks)
            self._armed = now

    def _look(self) -> None:
        """One tick: did anything move?"""
        seen = tuple((pulse.moved, id(pulse.waiting)) for pulse in self._pulses)
        # Time in which this process was stopped itself, or the machine slept, is nobody's silence.
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, 2 * self._tick_s), now
        if seen != self._seen:
            self._seen = seen
            said, told, is_teller, seconds = self._said, self._told, self._is_teller, time.time() - self._since
            self._forget(time.time())
            if said is not None:
                self._go_on(told, is_teller, seconds)
            return
        self._still_s += passed_s
        if self._still_s >= self._deadline_s() - self._grace_s:
            self._stand_still()

    def _deadline_s(self) -> float:
        """From when on standing still is a hang."""
        usual = max((pulse.usual_s() for pulse in self._pulses), default=0.0) if self._follows_steps else 0.0
        return min(max(_LEAST_S, _STEPS_OF_A_HANG * usual), self._limit_s / 2) if usual else self._warn_after_s

    def _forget(self, now: float) -> None:
        self._since, self._still_s = now, 0.0
        self._said: Standing | None = None
        self._told: HangReport | None = None
        self._is_teller = self._dumped = False

    def _stand_still(self) -> None:
        """Say where this rank stands; tell people, if that is on this rank; leave stacks once they are wanted."""
        store = self._open()
        if self._said is None:
            self._said = self._standing()
            self._put(store, f"{_PREFIX}{self._rank}", self._said.to_text())
            if self._said.waits_for:
                self._put(store, _WAITER, str(self._rank))
        if self._told is None and self._shall_tell(store):
            self._tell_people(store)
        if not self._dumped and self._read(_ALARM):
            self._dump()

    def _shall_tell(self, store: Store) -> bool:
        """One rank tells: the first, which has the terminal, if it can; else the first of those that wait."""
        assert self._said is not None
        over_s = self._still_s - self._deadline_s()
        if not self._is_teller:
            waits = bool(self._said.waits_for) and over_s >= self._grace_s
            may = bool(self._read(_WAITER)) if self._rank == 0 else waits
            self._is_teller = may and self._becomes_teller(store)
        return self._is_teller and over_s >= 0

    def _becomes_teller(self, store: Store) -> bool:
        """Return True if no other rank reports yet. A value that no rank signed keeps nobody from it."""
        assert self._key is not None
        signed = self._key.sign(_TELLER, str(self._rank))
        teller = self._key.opened(_TELLER, store.compare_set(_TELLER, "", signed.decode()))
        return teller is None or teller.decode() == str(self._rank)

    def _tell_people(self, store: Store) -> None:
        assert self._said is not None
        waiter = self._said
        if not waiter.waits_for:
            rank = self._read(_WAITER)
            if not rank:
                return  # it went on in the meantime
            waiter = self._ask(int(rank)) or waiter
        found = self._report(waiter, self._ask, self._process_of)
        if found.is_calm and self._still_s < self._warn_after_s:
            return  # a save takes its time
        self._told = found
        self._put(store, _ALARM, "1")
        self._tell(found.text)
        self._hand_on("fired", found)

    def _hand_on(self, state: str, found: HangReport) -> None:
        if self._on_report is not None:
            self._on_report(state, found)

    def _report(self, waiter: Standing, ask: Callable[[int], Standing | None], of: Callable[[int], str]) -> HangReport:
        end = time.strftime("%H:%M:%S", time.localtime(waiter.since + self._limit_s))
        rest = f"The wait ends at {end} ({self._limit_name}); Python stacks are in {self._where_stacks}."
        usual, planned = (
            max(found) for found in zip(*((one.usual_s(), one.planned_s) for one in self._pulses), strict=True)
        )
        if usual:
            beside = f" (planned: {format_seconds(planned)})" if planned else ""
            rest = f"A step usually takes {format_seconds(usual)}{beside}. {rest}"
        return report(waiter, ask, of, now=time.time(), rest=rest, zero=self._zero)

    def _tell_alone(self, error: Exception) -> None:
        """The store does not answer: tell once what this rank knows by itself."""
        self._store = None
        if self._said is None or not self._said.waits_for or self._told is not None or self._end.is_set():
            return
        self._told = self._report(
            self._said,
            lambda _: None,
            lambda rank: f"The state of rank {rank} is unknown: the ranks' store does not answer.",
        )
        self._tell(self._told.text)
        self._hand_on("fired", self._told)
        self._dump()

    def _go_on(self, told: HangReport | None, is_teller: bool, seconds: float) -> None:
        """Something moved: take back what was said."""
        if told is not None and not told.is_calm:
            names = ", ".join(f"rank {rank}" for rank in told.culprits[:8]) or "the ranks"
            verb = "continue" if len(told.culprits) != 1 else "continues"
            text = f"{names} {verb} after {format_seconds(seconds)}."
            self._tell(text)
            self._hand_on("ended", replace(told, text=text, standing=()))
        store = self._open()
        store.delete_key(f"{_PREFIX}{self._rank}")
        if is_teller:
            for key in (_ALARM, _WAITER, _TELLER):
                store.delete_key(key)

    def _standing(self) -> Standing:
        wait: Wait | None = next((pulse.waiting for pulse in self._pulses if pulse.waiting is not None), None)
        phases = [phase for pulse in self._pulses for phase in pulse.phases]
        own = stand(self._rank, self._since, wait, phases, any(pulse.in_step for pulse in self._pulses))
        if own.waits_for or not (axes := self._axes()):
            return own
        # A device works behind the host: what it has not finished is what this rank waits for.
        dump = nccl_trace()
        names = {str(axis.group.group_name): (axis.label, axis.ranks) for axis in axes if axis.group is not None}
        what, ranks = unfinished_on_device(dump(True, True), names) if dump is not None else ("", ())
        return stand(self._rank, self._since, _OnDevice(what, ranks), phases, own.in_step) if what else own

    def _ask(self, rank: int) -> Standing | None:
        text = self._read(f"{_PREFIX}{rank}")
        return Standing.from_text(text) if text else None

    def _process_of(self, rank: int) -> str:
        host, _, pid = self._read(f"{_PREFIX}place/{rank}").partition(" ")
        return process_state(rank, int(pid) if pid and host == host_mark()[0].hex() else None)

    def _read(self, key: str) -> str:
        """Return what a rank wrote under a key, or "" if nothing is there that a rank signed."""
        store = self._open()
        assert self._key is not None
        return (self._key.opened(key, store.get(key)) or b"").decode() if store.check([key]) else ""

    def _put(self, store: Store, key: str, text: str) -> None:
        assert self._key is not None
        store.set(key, self._key.sign(key, text).decode())

    def _open(self) -> Store:
        """A connection of this thread's own: the main thread may be waiting on the other."""
        if self._store is None:
            self._store = connect_store(_STORE_TIMEOUT)
        return self._store

    def _dump(self) -> None:
        self._dumped = True
        if self._stacks is None or self._said is None:
            return
        what = f"waits in {self._said.waits_for}" if self._said.waits_for else self._said.phase or "calls no collective"
        clock = time.strftime("%H:%M:%S", time.localtime(self._since))
        try:
            print(f"--- rank {self._rank} {what} since {clock}; its Python stacks: ---", file=self._stacks, flush=True)
            faulthandler.dump_traceback(self._stacks)
        except (OSError, ValueError):
            return  # a stream without a file, as in a notebook


class _OnDevice:
    """A collective that the device has not finished."""

    def __init__(self, what: str, ranks: tuple[int, ...]):
        self._where = what, ranks

    def where(self) -> tuple[str, tuple[int, ...]]:
        return self._where

    def late(self) -> tuple[int, ...]:
        return ()
