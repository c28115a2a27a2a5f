"""Fork server for ranks: one process imports torch once, and the launcher forks the ranks from it."""

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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import env
from weft.cli.launch.start import Preparation, Started, Starter, outcome
from weft.monitor.terminal import busy

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig
    from weft.train.folder import RunFolder

_KILLED = -int(signal.SIGKILL)
#: Seconds that the launcher waits for killed ranks to end.
_END_S = 10.0
_PROGRAM = (sys.executable, "-m", "weft.cli.launch.fork_server")


@contextlib.contextmanager
def rank_starter(run_dir: Path, config: RunConfig, num_ranks: int, cores: int) -> Generator[Starter]:
    """Yield the starter of a run's ranks: if possible a fork server, which begins to import the ranks' modules.

    Args:
        run_dir, config: the run's folder and config.
        num_ranks, cores: number of ranks of the first start, and of this machine's cores, which the ranks share.
    """
    from weft.cli.launch.launch import threads_variables
    from weft.cli.launch.start import Programs, preloaded_modules

    starter: Starter = Programs([sys.executable, "-m", "weft.cli.launch.rank", str(run_dir)])
    with contextlib.ExitStack() as until_over:
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # starting the ranks reports the error
                server = ForkServer(run_dir, threads_variables(num_ranks, cores), preloaded_modules(config), starter)
                starter = until_over.enter_context(contextlib.closing(server))
        yield starter


class ForkServer:
    """Launcher's side of the fork server. The constructor does not block; `start` waits for the imports.

    Args:
        run_dir: the run's folder, which ranks get as an argument.
        variables: environment of the server and its ranks, in addition to this process's own.
        modules: modules to import.
        instead: starter that is used if the server cannot start the ranks.
    """

    def __init__(self, run_dir: Path, variables: Mapping[str, str], modules: Sequence[str], instead: Starter):
        self._line, theirs = socket.socketpair()
        self._instead = instead
        with theirs:
            self._process = subprocess.Popen(
                [*_PROGRAM, str(run_dir), str(theirs.fileno())],
                # A new session, so that only the launcher receives Ctrl-C. Libraries that query GPUs must not
                # initialize CUDA.
                env=env.child_env(**variables, WEFT_LAUNCHED=str(os.getpid()), PYTORCH_NVML_BASED_CUDA_CHECK="1"),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._messages = self._line.makefile("r", encoding="utf-8")
        self._send({"load": list(modules)})
        self._loaded: dict[str, Any] | None = None

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """Start the ranks as forks, as in `Starter.start`; by `instead` if the server cannot fork or was killed.

        Raises OSError if the server could not start a rank.
        """
        if not self._is_fit():
            return self._instead.start(ranks)
        self._send({"ranks": {str(rank): dict(variables) for rank, variables in ranks.items()}})
        said = self._receive_message()
        if "pids" not in said:
            if said.get("error"):
                raise OSError(said["error"])
            self._loaded = {}  # the server was killed, so later starts do not use it
            return self._instead.start(ranks)
        return _Forks({int(rank): pid for rank, pid in said["pids"].items()}, self)

    def prepare(self, asked: Preparation) -> RunFolder:
        """Prepare the run, as in `Starter.prepare`.

        If preparation needs torch and the server can fork, this happens in a fork of it, else by `instead`.
        """
        if not asked.loads_torch or not self._is_fit():
            return self._instead.prepare(asked)
        self._send({"prepare": asked.written()})
        answer = None
        while "code" not in (said := self._receive_message()):
            if "answer" not in said:  # the server could not fork, or was killed
                self._loaded = {"fit": "error" in said}
                return self._instead.prepare(asked)
            answer = said["answer"]
        self._send({"over": True})
        return outcome(answer, said["code"])

    def close(self) -> None:
        """End the server and its forks."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._messages.close()
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _is_fit(self) -> bool:
        """Wait until the modules are imported, and return True if the server can fork."""
        if self._loaded is None:
            with busy(sys.stderr, "starting: loading torch"):
                self._loaded = self._receive_message()
        return bool(self._loaded.get("fit"))

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # if the server has ended, reading its response fails
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _receive_message(self) -> dict[str, Any]:
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
        self._exited = threading.Condition()
        self._listening = threading.Thread(target=self._listen, name="weft-ends-of-ranks", daemon=True)
        self._listening.start()

    def wait(self, rank: int) -> int:
        with self._exited:
            self._exited.wait_for(lambda: rank in self._codes)
            return self._codes[rank]

    def close(self) -> None:
        self._listening.join()
        self._server._send({"over": True})

    def _listen(self) -> None:
        while len(self._codes) < len(self.pids):
            said = self._server._receive_message()
            if not said:  # the server was killed, and so were its ranks
                # Wait until they have ended, so that their memory and ports are free for the next start.
                killed = [pid for rank, pid in self.pids.items() if rank not in self._codes]
                until = time.monotonic() + _END_S
                while time.monotonic() < until and any(map(_is_running, killed)):
                    time.sleep(0.02)
            ended = {said["rank"]: said["code"]} if said else dict.fromkeys(self.pids.keys() - self._codes, _KILLED)
            with self._exited:
                self._codes |= ended
                self._exited.notify_all()


def _is_running(pid: int) -> bool:
    """Return True if a process is running, and not a zombie that its parent has not reaped yet."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Ranks as forks of one process that imports torch once, while the launcher checks the run and prepares its data.

#: Device file that a process opens when it initializes CUDA. Forks of such a process cannot use CUDA.
_STARTED_CUDA = "/dev/nvidia-uvm"

#: Function to run in a fork of the server, which ends when it returns.
_Role = Callable[[], None]


class _Server:
    """Server process. After a fork, its methods return in the child the function to run there, and None in the server.

    `said` is the output of the imported modules, `threads` the OMP_NUM_THREADS at import.
    """

    def __init__(self, line: socket.socket):
        self._line = line
        self.said = ""
        self.threads = env.get("OMP_NUM_THREADS")
        self._waiting = b""
        self._ranks: dict[int, tuple[int | None, int]] = {}  # descriptor -> rank (None: prepares the run), process id
        self._store: tuple[int, int] | None = None  # process id, and the descriptor to close to end it

    def serve(self) -> _Role | None:
        """Handle the launcher's orders until it has ended, and return None. In a forked child, return its function."""
        while True:
            read = b"\n" in self._waiting  # the next order was received with the previous one
            ready = select.select([self._line, *self._ranks], [], [], 0 if read else None)[0]
            for descriptor in ready:
                if isinstance(descriptor, int):
                    rank, pid = self._ranks.pop(descriptor)
                    os.close(descriptor)
                    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                    assert end is not None
                    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                    self.send({"rank": rank, "code": code})
            if read or self._line in ready:
                order = self._order()
                if order is None:
                    return None
                if "over" in order:
                    self._let_go()
                elif (role := self._forked(order)) is not None:
                    return role

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # if the launcher has ended, the next read detects it
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
            self.send({"error": str(error)})
        return None

    def _fork_ranks(self, ranks: Mapping[str, Mapping[str, str]]) -> _Role | None:
        pids: dict[str, int] = {}
        server, port = os.getpid(), self._open_store()
        for rank, variables in ranks.items():
            pid = self._fork(int(rank))
            if pid is None:
                self._line.close()
                for descriptor in (*self._ranks, *(self._store or ())[1:]):
                    os.close(descriptor)
                own = {**variables, **env.own_rank(int(rank), len(ranks), port, server)}
                return functools.partial(_be_rank, own, self.said, self.threads)
            pids[rank] = pid
        self.send({"pids": pids})
        return None

    def _fork(self, rank: int | None) -> int | None:
        """Fork a process that leads a new process group. Return its id, or None in the fork."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return None
        with contextlib.suppress(OSError):  # parent and child both call setpgid, because either may run first
            os.setpgid(pid, pid)
        self._ranks[os.pidfd_open(pid)] = rank, pid
        return pid

    def _prepare(self, asked: Mapping[str, Any]) -> None:
        from weft.cli.launch.rank import name_process
        from weft.cli.launch.start import Preparation

        name_process("weft-prepare")
        self.send({"answer": Preparation.read(asked).answered()})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # finalizing torch would double the time of this process, and the launcher waits for it

    def _open_store(self) -> int:
        """Start a process that hosts the rendezvous store of the next ranks, and return the store's port.

        Raises OSError if the process gets no port.
        """
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

    def _let_go(self) -> None:
        """End the store's process and wait for all children. Called when the launcher sends them no more signals."""
        if self._store is not None:
            os.close(self._store[1])
            self._store = None
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _host_store(parent: int, told: int, held: int) -> None:
    """Host a store until the other end of `held` is closed. Runs in a forked process and never returns."""
    try:
        from weft.cli.launch.rank import die_with
        from weft.comm.mesh import loopback_store

        die_with(parent)

        store = loopback_store(env.LOOPBACK, 0)
        os.write(told, str(store.port).encode())
        os.close(told)
        os.read(held, 1)
    finally:
        os._exit(0)


def _load(modules: Sequence[str]) -> str:
    """Import the ranks' modules, and return their printed output, for the ranks' logs."""
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        try:
            for module in modules:
                with contextlib.suppress(Exception):  # the rank that needs it reports the error
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
    """Return True if forks of this process work like fresh processes."""
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(_STARTED_CUDA):
                return False
    return threading.active_count() == 1


def main() -> None:
    """Run the fork server.

    In a forked child, run the rank and then return, so that the child exits like a fresh process.
    """
    from weft.cli.launch.rank import die_with, name_process

    die_with(env.launcher_pid())
    name_process("weft-fork")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=int(sys.argv.pop())))
    order = server._order()
    if order is None:
        return
    gc.disable()  # collections during imports took a sixth of the time and freed almost nothing
    server.said = _load(order["load"])
    gc.freeze()  # otherwise each rank's first collection would copy shared pages
    gc.enable()
    server.send({"fit": _is_fit()})
    parent = os.getpid()
    role = server.serve()
    if role is not None:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        role()


def _be_rank(variables: Mapping[str, str], said: str, threads: str | None) -> None:
    from weft.cli.launch.rank import main as be_a_rank

    if variables.get("OMP_NUM_THREADS", threads) != threads:  # fewer ranks than at the first start
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    env.set_for_children(**variables)
    be_a_rank(said)


if __name__ == "__main__":
    main()
