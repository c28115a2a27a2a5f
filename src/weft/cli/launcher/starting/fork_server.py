"""Ranks as forks of one process that loads torch once, while the launcher checks the run and prepares its data.

Each rank would load the same modules anew: some seconds of a core, times the ranks of a host. The server loads them,
starts no thread and touches no device, and then forks: for each start, and for each restart after a fault. A process
of its own hosts the store where the ranks meet, since what hosts it has threads.

`python -m weft.cli.launcher.starting.fork_server` is the server; what it loads comes over its line to the launcher.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft import env
from weft.cli.launcher.starting.programs import Started, Starter

#: Only a process that has started CUDA holds it open, and no fork of that one can use CUDA.
_STARTED_CUDA = "/dev/nvidia-uvm"
_KILLED = -int(signal.SIGKILL)
_PROGRAM = (sys.executable, "-m", "weft.cli.launcher.starting.fork_server")


class ForkServer:
    """The launcher's end. Starting it returns at once; `start` waits until all is loaded.

    Args:
        run_dir: of the run, which ranks find in their arguments.
        variables: environment of the server and its ranks, on top of this process's own.
        modules: what it loads.
        instead: starts the ranks where the server cannot.
    """

    def __init__(self, run_dir: Path, variables: Mapping[str, str], modules: Sequence[str], instead: Starter):
        self._line, theirs = socket.socketpair()
        self._instead = instead
        with theirs:
            self._process = subprocess.Popen(
                [*_PROGRAM, str(run_dir), str(theirs.fileno())],
                # A Ctrl-C of the terminal reaches the launcher alone. Libraries that ask for GPUs shall not start CUDA.
                env=env.child_env(**variables, WEFT_LAUNCHED=str(os.getpid()), PYTORCH_NVML_BASED_CUDA_CHECK="1"),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._messages = self._line.makefile("r", encoding="utf-8")
        self._say({"load": list(modules)})
        self._loaded: dict[str, Any] | None = None

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """As `Starter.start`."""
        if self._loaded is None:
            self._loaded = self._hear()
        if not self._loaded.get("fit"):
            return self._instead.start(ranks)
        self._say({"ranks": {str(rank): dict(variables) for rank, variables in ranks.items()}})
        said = self._hear()
        if "pids" not in said:
            if said.get("error"):
                raise OSError(said["error"])
            self._loaded = {}  # it was killed: the next starts do without it
            return self._instead.start(ranks)
        return _Forks({int(rank): pid for rank, pid in said["pids"].items()}, self)

    def close(self) -> None:
        """End the server, and what it has left."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._messages.close()
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the answer tells
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self) -> dict[str, Any]:
        """The next message; empty where the server is gone."""
        try:
            return json.loads(self._messages.readline() or "{}")
        except (OSError, ValueError):
            return {}


class _Forks:
    """Ranks that the server forked. It tells how each ended, and keeps them until it is told to let go."""

    def __init__(self, pids: dict[int, int], server: ForkServer):
        self.pids = pids
        self._server = server
        self._codes: dict[int, int] = {}
        self._told = threading.Condition()
        self._listening = threading.Thread(target=self._listen, name="weft-ends-of-ranks", daemon=True)
        self._listening.start()

    def wait(self, rank: int) -> int:
        with self._told:
            self._told.wait_for(lambda: rank in self._codes)
            return self._codes[rank]

    def close(self) -> None:
        self._listening.join()
        self._server._say({"over": True})

    def _listen(self) -> None:
        while len(self._codes) < len(self.pids):
            said = self._server._hear()
            # Where the server was killed its ranks were killed with it.
            ended = {said["rank"]: said["code"]} if said else dict.fromkeys(self.pids.keys() - self._codes, _KILLED)
            with self._told:
                self._codes |= ended
                self._told.notify_all()


class _Server:
    """The server's end. Its methods return an environment in a fork that is to become a rank, and None otherwise."""

    def __init__(self, line: socket.socket):
        self._line = line
        self._waiting = b""
        self._ranks: dict[int, tuple[int, int]] = {}  # descriptor -> rank, process id
        self._store: tuple[int, int] | None = None  # process id, and what ends it when it is closed

    def serve(self) -> Mapping[str, str] | None:
        """Follow orders until the launcher is gone."""
        while True:
            ready = select.select([self._line, *self._ranks], [], [])[0]
            for descriptor in ready:
                if isinstance(descriptor, int):
                    self._tell_end(descriptor)
            if self._line in ready:
                order = self._order()
                if order is None:
                    return None
                if "ranks" in order and (variables := self._fork(order["ranks"])) is not None:
                    return variables
                if "over" in order:
                    self._let_go()

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

    def _fork(self, ranks: dict[str, dict[str, str]]) -> Mapping[str, str] | None:
        pids: dict[str, int] = {}
        parent = os.getpid()
        try:
            port = self._open_store()
            for rank, variables in ranks.items():
                pid = os.fork()
                if pid == 0:
                    os.setpgid(0, 0)
                    self._close_all()
                    return {**variables, **env.own_rank(int(rank), len(ranks), port, parent)}
                with contextlib.suppress(OSError):  # either of the two may be first
                    os.setpgid(pid, pid)
                pids[rank] = pid
                self._ranks[os.pidfd_open(pid)] = int(rank), pid
        except OSError as error:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            self._let_go()
            self.say({"error": str(error)})
            return None
        self.say({"pids": pids})
        return None

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
    from weft.cli.launcher.rank import main as be_a_rank

    die_with(env.launcher_pid())
    name_process("weft-fork")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=int(sys.argv.pop())))
    order = server._order()
    if order is None:
        return
    loaded_for = env.get("OMP_NUM_THREADS")
    said = _load(order["load"])
    gc.collect()
    gc.freeze()  # else the first collection of each rank would write to all that they share
    server.say({"fit": _is_fit()})
    variables = server.serve()
    if variables is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if variables.get("OMP_NUM_THREADS", loaded_for) != loaded_for:  # fewer ranks than at the first start
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    env.set_for_children(**variables)
    be_a_rank(said)


if __name__ == "__main__":
    main()
