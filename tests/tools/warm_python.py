"""Start Weft's programs as forks of a process that has imported torch, which takes 4 s of processor time.

`install` replaces the system call of `subprocess` in this process: with the variable `FORKS` in its environment,
`[sys.executable, "-m", MODULE, ...]` with a module of `MODULES` becomes a fork, and so does a script, and code after
`-c`. It is a child of this process, with the arguments, environment, folder and descriptors that it would have as a new
program. Other programs start as usual: tests of starting, of signals and of processes that are looked for by their
command line or environment do not set the variable.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

#: Programs that run as forks. `weft` starts the others.
MODULES = ("weft", "weft.cli.launch.fork_server", "weft.cli.launch.rank", "weft.cli.train",
           "weft.inference.task_metrics", "torch.distributed.run")  # fmt: skip
#: Variable of programs that may be forks.
FORKS = "WEFT_TEST_FORKS"
#: Imports of the process that forks. Libraries that read the environment at import, such as transformers, are left out.
IMPORTED = ("torch._dynamo", "weft.train.engines.torch_engine", "weft.train.rank_run", "weft.train.tasks.decoder",
            "weft.monitor", "weft.models", "weft.cli.app", "weft.config.files",
            "weft.cli.launch.restarts")  # fmt: skip
#: Programs that start others of these. The others may wait for all their children, so they have no further one.
_STARTERS = ("weft", "torch.distributed.run")
_SET_SUBREAPER = 36  # prctl(2)
_FREE = 512  # descriptors from here on have no other use
_ADOPTED_S = 10.0

_FORK_SERVER = "from multiprocessing.forkserver import main"

_spawn: Callable[..., int] = vars(multiprocessing.util)["spawnv_passfds"]
_original: Callable[..., int] = vars(subprocess)["_fork_exec"]
_environment = dict(os.environ)


class _Mother:
    """This process's end of the socket to the process that forks, which is its child."""

    current: _Mother | None = None

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None):
        self.line, self.process, self.owner, self.lock = line, process, os.getpid(), threading.Lock()
        self.variables = _read_at_import(_environment)

    @property
    def has_ended(self) -> bool:
        """True if the process that forks was killed."""
        return self.process is not None and self.process.poll() is not None

    def fork(self, order: dict[str, Any], streams: Sequence[int], kept: Sequence[int]) -> int:
        """Start a program and return its process id.

        Args:
            order: command line, environment, folder, and whether it leads a session.
            streams: descriptors of its standard streams.
            kept: descriptors that it gets under the same numbers.
        """
        own = {"kept": list(kept), "cores": sorted(os.sched_getaffinity(0)), "parent": os.getpid()}
        text = json.dumps({**order, **own}).encode()
        with self.lock, _adopting():
            socket.send_fds(self.line, [struct.pack("i", len(text))], [*streams, *kept])
            self.line.sendall(text)
            return struct.unpack("i", _read(self.line, 4))[0]


@contextlib.contextmanager
def _adopting():
    """Make orphans of descendants children of this process: the new program's first parent ends at once."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the interpreter and torch read when they start. torchrun's are read later."""
    others = ("PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_", "TORCH_NCCL_")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("PYTHON", "TORCH")) and not name.startswith(others)
    }


def install() -> None:
    """Let `subprocess` fork Weft's programs. The process that forks starts with the first of them."""
    vars(subprocess)["_fork_exec"] = _fork_exec
    vars(multiprocessing.util)["spawnv_passfds"] = _spawnv_passfds


def _fork_exec(args: Sequence[bytes | str], *rest: Any) -> int:
    words = [os.fsdecode(word) for word in args]
    (_, _, keep, cwd, variables, stdin, _, _, stdout, _, stderr, _, error_pipe, _, new_session, group, *more) = rest
    given = [os.fsdecode(one).partition("=") for one in variables or ()]
    environment = {name: value for name, _, value in given} if variables is not None else dict(os.environ)
    if FORKS in environment and words[0] == sys.executable and _is_known(words):
        has_more = group != -1 or more[0] is not None or more[2] is not None or more[4] is not None
        mother = _ready_mother()
        if mother is not None and not has_more and _read_at_import(environment) == mother.variables:
            streams = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
            order = {"environment": environment, "cwd": os.fsdecode(cwd or os.getcwd()), "new_session": new_session}
            return mother.fork({**order, "words": words}, streams, sorted(set(keep) - {error_pipe}))
    return _original(args, *rest)


def _spawnv_passfds(path: str, args: Sequence[str], passfds: Sequence[int]) -> int:
    """Start the server from which multiprocessing forks, as `RankPool` asks it to, as a fork."""
    mother = _ready_mother() if FORKS in os.environ and args[-1].startswith(_FORK_SERVER) else None
    if mother is None or _read_at_import(os.environ) != mother.variables:
        return _spawn(path, args, passfds)
    order = {"environment": dict(os.environ), "cwd": os.getcwd(), "new_session": False}
    return mother.fork({**order, "words": [os.fsdecode(args[0]), "-c", args[-1]]}, (0, 1, 2), sorted(passfds))


def _is_known(words: Sequence[str]) -> bool:
    """Return True for a program that may be a fork."""
    option, name = program_of(words)
    return name in MODULES if option == "-m" else option == "-c" or name.endswith(".py")


def program_of(words: Sequence[str]) -> tuple[str, str]:
    """Return the option of a command line of Python that names a program (-m, -c, or "" for a script), and the name."""
    place = 2 if words[1:2] == ["-u"] else 1
    option = words[place] if words[place : place + 1] in (["-m"], ["-c"]) else ""
    return option, "".join(words[place + bool(option) : place + bool(option) + 1])


def _ready_mother() -> _Mother | None:
    """Return the process that forks for this one. A fork of a program that does not start others has none."""
    if _Mother.current is not None and _Mother.current.owner != os.getpid():
        return None
    if _Mother.current is None or _Mother.current.has_ended:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.warm_python", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
            )  # fmt: skip
        _Mother.current = _Mother(ours, process)
    return _Mother.current


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _serve(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order until the other end is closed. Returns only in a fork: its order and descriptors."""
    while True:
        try:
            size, ancillary, _, _ = line.recvmsg(4, socket.CMSG_SPACE(64 * 4))
            order = json.loads(_read(line, struct.unpack("i", size)[0])) if size else None
        except (EOFError, OSError):
            order = None
        if order is None:
            os._exit(0)  # without the second that torch takes to end
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            until = time.monotonic() + _ADOPTED_S
            while os.getppid() != order["parent"]:  # until `between` has ended
                if time.monotonic() > until:
                    os._exit(1)
                time.sleep(0.0002)
            line.sendall(struct.pack("i", os.getpid()))
            line.close()
            return order, list(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def _become(order: dict[str, Any], received: Sequence[int]) -> None:
    """Set the session, descriptors, folder, environment and arguments of this fork."""
    if order["new_session"]:
        os.setsid()
    for target, one in zip([0, 1, 2, *order["kept"]], list(map(_moved, received)), strict=True):
        os.dup2(one, target, inheritable=target < 3)
        os.close(one)
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["cores"])
    os.environ.clear()
    os.environ.update(order["environment"])
    words = order["words"]
    option, name = program_of(words)
    unbuffered = words[1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.__stdout__ = _stream(1, unbuffered, "strict")
    sys.stderr = sys.__stderr__ = _stream(2, unbuffered, "backslashreplace")
    multiprocessing.process.ORIGINAL_DIR = order["cwd"]  # pyright: ignore[reportAttributeAccessIssue] - for `spawn`
    sys.orig_argv, sys.argv = words, words[words.index(name) :]
    if option == "-c":
        sys.argv[0] = option
    sys.path[0] = order["cwd"] if option else str(Path(name).resolve().parent)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(order["cores"])))


def _stream(descriptor: int, unbuffered: bool, errors: str) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115 - open until the process ends
    lines = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(raw, errors=errors, line_buffering=lines, write_through=unbuffered)


def _moved(descriptor: int) -> int:
    """Move a descriptor out of the way of those that a program is given."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(descriptor)
    return moved


def _run(line: socket.socket) -> None:
    """Fork programs. A fork that may start others first forks a process that forks them."""
    order, received = _serve(line)
    _Mother.current = None
    option, name = program_of(order["words"])
    if name in _STARTERS:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            for descriptor in (ours.detach(), *received):
                os.close(descriptor)
            _run(theirs)
            return
        theirs.close()
        _Mother.current = _Mother(socket.socket(fileno=_moved(ours.detach())))
        install()
    _become(order, received)
    if option == "-c":
        exec(name, {"__name__": "__main__"})
        return
    if not option:
        runpy.run_path(name, run_name="__main__")
        return
    if name != "weft":
        sys.modules.pop(name, None)  # a new program has it only as __main__
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(line: socket.socket) -> None:
    """Import, and fork programs until the parent ends."""
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # otherwise each fork's first collection would copy shared pages
    gc.enable()
    _run(line)


if __name__ == "__main__":
    from tests.tools import warm_python  # so that `install` changes the module that programs see

    warm_python.main(socket.socket(fileno=int(sys.argv.pop())))
