"""Ranks as forks of one process that loads torch once, while the launcher checks the run and prepares its data.

Each rank would load the same modules anew: some seconds of a core, times the ranks of a host. The server loads them,
starts no thread and touches no device, and then forks: for each start, and for each restart after a fault. A process
of its own hosts the store where the ranks meet, since what hosts it has threads. Where a run's task needs torch to be
checked, a fork does that too, and the launcher need not load torch for it.

`python -m weft.cli.launcher.starting.fork_server` is the server; what it loads comes over its line to the launcher.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft import env

#: Only a process that has started CUDA holds it open, and no fork of that one can use CUDA.
_STARTED_CUDA = "/dev/nvidia-uvm"

#: What a fork of the server is to be; it ends when that returns.
_Role = Callable[[], None]


class _Server:
    """The server's end. Its methods return what a fork is to be in a fork, and None otherwise.

    said: what the loaded modules wrote to the standard streams. threads: OMP_NUM_THREADS when they were loaded.
    """

    def __init__(self, line: socket.socket):
        self._line = line
        self.said = ""
        self.threads = env.get("OMP_NUM_THREADS")
        self._waiting = b""
        self._ranks: dict[int, tuple[int | None, int]] = {}  # descriptor -> rank (None: it prepares), process id
        self._store: tuple[int, int] | None = None  # process id, and what ends it when it is closed

    def serve(self) -> _Role | None:
        """Follow orders until the launcher is gone."""
        while True:
            read = b"\n" in self._waiting  # with the order before: the line may have no more
            ready = select.select([self._line, *self._ranks], [], [], 0 if read else None)[0]
            for descriptor in ready:
                if isinstance(descriptor, int):
                    self._tell_end(descriptor)
            if read or self._line in ready:
                order = self._order()
                if order is None:
                    return None
                if "over" in order:
                    self._let_go()
                elif (role := self._forked(order)) is not None:
                    return role

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, which the next look at the line tells
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _order(self) -> dict[str, Any] | None:
        while b"\n" not in self._waiting:
            part = self._line.recv(65536)
            if not part:
                return None
            self._waiting += part
        line, _, self._waiting = self._waiting.partition(b"\n")
        return json.loads(line)

    def _forked(self, order: Mapping[str, Any]) -> _Role | None:
        before = set(self._ranks)
        try:
            if "ranks" in order:
                return self._fork_ranks(order["ranks"])
            if self._fork(None) is None:
                return functools.partial(self._prepare, order["prepare"])
        except OSError as error:
            for _, pid in (self._ranks[one] for one in self._ranks.keys() - before):
                os.kill(pid, signal.SIGKILL)
            self._let_go()
            self.say({"error": str(error)})
        return None

    def _fork_ranks(self, ranks: Mapping[str, Mapping[str, str]]) -> _Role | None:
        pids: dict[str, int] = {}
        server, port = os.getpid(), self._open_store()
        for rank, variables in ranks.items():
            pid = self._fork(int(rank))
            if pid is None:
                self._close_all()
                own = {**variables, **env.own_rank(int(rank), len(ranks), port, server)}
                return functools.partial(_be_rank, own, self.said, self.threads)
            pids[rank] = pid
        self.say({"pids": pids})
        return None

    def _fork(self, rank: int | None) -> int | None:
        """Fork a process that leads a group of its own; its id, and None in itself. rank: that it is to be, if any."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return None
        with contextlib.suppress(OSError):  # either of the two may be first
            os.setpgid(pid, pid)
        self._ranks[os.pidfd_open(pid)] = rank, pid
        return pid

    def _prepare(self, asked: Mapping[str, Any]) -> None:
        """Prepare the run, in a fork, and tell the launcher."""
        from weft.cli.launcher.rank import name_process
        from weft.cli.launcher.starting.prepared_run import Preparation

        name_process("weft-prepare")
        self.say({"answer": Preparation.read(asked).answered()})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # the launcher waits for its end, and taking torch apart would be half of this process's time

    def _open_store(self) -> int:
        """Have a process host the store of the next ranks; the port it listens on."""
        reads, told = os.pipe()
        held, holds = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reads)
            os.close(holds)
            self._line.close()
            _host_store(parent, told, held)
        os.close(told)
        os.close(held)
        self._store = pid, holds
        with os.fdopen(reads, "rb") as answer:
            port = answer.read()
        if not port:
            raise OSError("the loopback interface gives no port")
        return int(port)

    def _tell_end(self, descriptor: int) -> None:
        rank, pid = self._ranks.pop(descriptor)
        os.close(descriptor)
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        self.say({"rank": rank, "code": code})

    def _let_go(self) -> None:
        """Collect what has ended, once nobody sends signals to it any more."""
        if self._store is not None:
            os.close(self._store[1])
            self._store = None
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _close_all(self) -> None:
        """In a fork: what is the server's alone."""
        self._line.close()
        for descriptor in (*self._ranks, *(self._store or ())[1:]):
            os.close(descriptor)


def _host_store(parent: int, told: int, held: int) -> None:
    """Host a store until the other end of `held` is closed, as a process of its own that never returns."""
    try:
        from weft.cli.launcher.rank import die_with
        from weft.mesh import loopback_store

        die_with(parent)

        store = loopback_store(env.LOOPBACK, 0)
        os.write(told, str(store.port).encode())
        os.close(told)
        os.read(held, 1)
    finally:
        os._exit(0)


def _load(modules: Sequence[str]) -> str:
    """Import what ranks will; returns what that wrote to the standard streams, which belongs into the ranks' logs."""
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        try:
            for module in modules:
                with contextlib.suppress(Exception):  # the rank that needs it tells why
                    importlib.import_module(module)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for stream, old in zip((1, 2), kept, strict=True):
                os.dup2(old, stream)
                os.close(old)
        said.seek(0)
        return said.read().decode(errors="replace")


def _is_fit() -> bool:
    """Whether a fork of this process can do what a fresh one can."""
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(_STARTED_CUDA):
                return False
    return threading.active_count() == 1


def main() -> None:
    """Be the server; in each fork, be a rank. A rank ends as a fresh program does, by leaving this function."""
    from weft.cli.launcher.rank import die_with, name_process

    die_with(env.launcher_pid())
    name_process("weft-fork")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=int(sys.argv.pop())))
    order = server._order()
    if order is None:
        return
    gc.disable()  # nearly all that modules make stays: looking through it again and again took a sixth of the load
    server.said = _load(order["load"])
    gc.freeze()  # else the first collection of each rank would write to all that they share
    gc.enable()
    server.say({"fit": _is_fit()})
    parent = os.getpid()
    role = server.serve()
    if role is not None:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        role()


def _be_rank(variables: Mapping[str, str], said: str, threads: str | None) -> None:
    from weft.cli.launcher.rank import main as be_a_rank

    if variables.get("OMP_NUM_THREADS", threads) != threads:  # fewer ranks than at the first start
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    env.set_for_children(**variables)
    be_a_rank(said)


if __name__ == "__main__":
    main()
