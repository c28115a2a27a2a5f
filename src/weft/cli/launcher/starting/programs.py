"""The processes of the ranks: who starts them, waits for their ends, and keeps their ids taken until all have ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from weft import env
from weft.env import LOOPBACK

if TYPE_CHECKING:
    from weft.cli.launcher.starting.prepared_run import Preparation
    from weft.train import RunFolder


class Starter(Protocol):
    """Starts the ranks of one machine, once for each attempt."""

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """Start one process a rank.

        Args:
            ranks: the environment of each, on top of this process's own.

        Raises:
            OSError: where one cannot be started.
        """
        ...

    def prepare(self, asked: Preparation) -> RunFolder:
        """Make the run ready, as `Preparation.here`."""
        ...


class Started(Protocol):
    """Ranks that were started. pids: by rank; each leads a process group of its own."""

    pids: dict[int, int]

    def wait(self, rank: int) -> int:
        """Wait until a rank's process ends; returns its exit code, below 0 for the number of a signal.

        Its process id is not given to another process before `close`.
        """
        ...

    def close(self) -> None:
        """Let go of processes that have ended. Those that have not are waited for."""
        ...


class Programs:
    """Starts each rank as a program of its own, and hosts the store where they meet.

    Args:
        command: the command line of a rank.
    """

    def __init__(self, command: Sequence[str]):
        self._command = list(command)

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """Start one program a rank, and the store where they meet."""
        from weft.mesh import loopback_store

        # Port 0: the system chooses a free one, so two runs on one machine never meet.
        store = loopback_store(LOOPBACK, 0)
        return _Programs(self._command, ranks, store, store.port)

    def prepare(self, asked: Preparation) -> RunFolder:
        """Make the run ready in this process."""
        return asked.here()


class _Programs:
    """Processes that this one started. They inherit no descriptor but the standard streams."""

    def __init__(self, command: list[str], ranks: Mapping[int, Mapping[str, str]], store: object, port: int):
        self._store = store
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, variables in ranks.items():
                given = env.child_env(**variables, **env.own_rank(rank, len(ranks), port, os.getpid()))
                self._processes[rank] = subprocess.Popen(command, env=given, start_new_session=True)
        except OSError:
            for process in self._processes.values():
                process.kill()
                process.wait()
            raise
        self.pids = {rank: process.pid for rank, process in self._processes.items()}

    def wait(self, rank: int) -> int:
        process = self._processes[rank]
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return process.wait()
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def close(self) -> None:
        for process in self._processes.values():
            process.wait()
