"""The launcher's end of the server that ranks are forked from (fork_server.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import env
from weft.cli.launcher.starting.prepared_run import Preparation, outcome
from weft.cli.launcher.starting.programs import Started, Starter
from weft.monitor.screen import busy

if TYPE_CHECKING:
    from weft.train import RunFolder

_KILLED = -int(signal.SIGKILL)
#: So long the launcher waits for ranks that were killed.
_END_S = 10.0
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
        if not self._is_fit():
            return self._instead.start(ranks)
        self._say({"ranks": {str(rank): dict(variables) for rank, variables in ranks.items()}})
        said = self._hear()
        if "pids" not in said:
            if said.get("error"):
                raise OSError(said["error"])
            self._loaded = {}  # it was killed: the next starts do without it
            return self._instead.start(ranks)
        return _Forks({int(rank): pid for rank, pid in said["pids"].items()}, self)

    def prepare(self, asked: Preparation) -> RunFolder:
        """As `Starter.prepare`: in a fork of the server, where this process would have to load torch for it."""
        if not asked.loads_torch or not self._is_fit():
            return self._instead.prepare(asked)
        self._say({"prepare": asked.written()})
        answer = None
        while "code" not in (said := self._hear()):
            if "answer" not in said:  # it could not fork, or was killed
                self._loaded = {"fit": "error" in said}
                return self._instead.prepare(asked)
            answer = said["answer"]
        self._say({"over": True})
        return outcome(answer, said["code"])

    def close(self) -> None:
        """End the server, and what it has left."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._messages.close()
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _is_fit(self) -> bool:
        """Whether it can fork; waits until all is loaded."""
        if self._loaded is None:
            with busy(sys.stderr, "starting: loading torch"):
                self._loaded = self._hear()
        return bool(self._loaded.get("fit"))

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
    """Ranks that the server forked. The server reports the exit code of each, and reaps them after `close`."""

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
            if not said:  # the server was killed, and its ranks with it
                _wait_for_end([pid for rank, pid in self.pids.items() if rank not in self._codes])
            ended = {said["rank"]: said["code"]} if said else dict.fromkeys(self.pids.keys() - self._codes, _KILLED)
            with self._told:
                self._codes |= ended
                self._told.notify_all()


def _wait_for_end(pids: Sequence[int]) -> None:
    """Wait until processes that were killed have ended: their memory and ports are free then, for the next start."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until and any(map(_is_running, pids)):
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Whether a process that is no child of this one runs; one that has ended may not be reaped yet."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
