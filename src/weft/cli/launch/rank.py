"""The command that the user typed, as words, for lines that say what to type next."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from weft import env
from weft.checkpoint.peer_copies import CopyHome
from weft.cli.launch.failure import Failure, error_path, log_path, write_failure
from weft.cli.launch.switchboard import LauncherLine, launcher_line
from weft.env import RankEnv
from weft.monitor.terminal import busy
from weft.train.folder import restrict_new_files
from weft.train.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: Programs that start a Python file as ranks, and the module that torchrun is.
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def typed_command(argv: Sequence[str] | None = None, parent: Sequence[str] | None = None) -> list[str]:
    """Return this process's command line as a person types it; of a rank of torchrun, torchrun's.

    argv: of this process; parent: the command line of the process that started it. By default both are looked up.
    A rank cannot know the srun command that started it, so this is the rank's own command.
    """
    argv = sys.argv if argv is None else argv
    if parent is None:
        parent = _parent()
    for place, word in enumerate(parent):
        if word in _TORCHRUN or Path(word).name == "torchrun":
            launcher = ["torchrun"] if Path(word).name == "torchrun" else ["python", "-m", word]
            return [*launcher, *parent[place + 1 :]]
    name = Path(argv[0]).name
    program = ["python", "-m", "weft"] if name == "__main__.py" else [name]
    return [*program, *argv[1:]]


def _parent() -> list[str]:
    import psutil

    try:
        found = psutil.Process().parent()
        return found.cmdline() if found is not None else []
    except psutil.Error:
        return []  # Not ours to look at, or gone.


# One rank's process: a fork of the server (starting/fork_server.py), or `python -m weft.cli.launch.rank RUN_DIR`.

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

#: What a rank runs; it gets the terminal on rank 0 and None on the others.
RankBody = Callable[[TextIO | None], object]


def run_as_rank(logs: Path, place: RankEnv, body: RankBody, line: LauncherLine | None = None) -> None:
    """Run `body` as one rank; on failure say so and end the process with the error's exit code.

    From here on, file descriptors 1 and 2 lead to logs/rank_N.log. The process dies with its launcher.

    Args:
        logs: folder of the logs, and of a record of the failure.
        place: which rank it is of how many.
        body: what the rank does; called with the stream of the terminal.
        line: the failure goes to the launcher over it; None: to the old stderr.
    """
    die_with(env.parent_pid())
    outcry = None
    try:
        logs.parent.mkdir(parents=True, exist_ok=True)
        restrict_new_files(logs.parent)
        logs.mkdir(exist_ok=True)
        error_path(logs, place.rank).unlink(missing_ok=True)
        terminal, outcry = _redirect(log_path(logs, place.rank), place)
        body(terminal)
    # Whatever ends a rank is recorded, SystemExit and Ctrl-C too: this is the last frame of the process.
    except BaseException as error:
        failure = Failure.from_exception(place.rank, error)
        if failure.exit_code != 0:
            _report(failure, logs, outcry, line)
        _flush()
        # A thread that waits on a dead peer would keep a normal exit from ending.
        os._exit(failure.exit_code)
    # All is done and saved: who asks to stop now gets what was wished.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    _flush()


def _report(failure: Failure, logs: Path, outcry: TextIO | None, line: LauncherLine | None) -> None:
    """Say it first where no disk is needed: the rest may fail for the reason that the rank failed for."""
    if line is not None:
        line.tell(failure)
    with contextlib.suppress(OSError):
        if outcry is not None:
            _notify_all(outcry, failure, log_path(logs, failure.rank))
    if failure.action:
        print(failure.message, file=sys.stderr)  # all is well: no trace, and no record of a failure
        return
    print(failure.traceback, file=sys.stderr)
    write_failure(logs, failure)


def _redirect(log: Path, place: RankEnv) -> tuple[TextIO | None, TextIO | None]:
    """Send descriptors 1 and 2 to the log; returns what they were: (stdout of rank 0, stderr without our launcher).

    The old stderr is where a rank of torchrun or srun says itself why it failed.
    """
    _flush()
    terminal = second_handle(1) if place.rank == 0 else None
    outcry = second_handle(2) if place.starter != "weft" else None
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout, sys.stderr = _lossy_stream(1), _lossy_stream(2)
    faulthandler.enable(file=2)
    clock = time.strftime("%Y-%m-%d %H:%M:%S%z")
    with contextlib.suppress(OSError):  # whoever needs the disk reports that it is full
        os.write(1, f"--- rank {place.rank} of {place.world_size}, pid {os.getpid()}, {clock} ---\n".encode())
    return terminal, outcry


def second_handle(descriptor: int) -> TextIO:
    """Return a stream of its own to where the descriptor leads now."""
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="replace")


def _notify_all(outcry: TextIO, failure: Failure, log: Path) -> None:
    if failure.lost_peer:
        text = f"rank {failure.rank} lost its connection to another rank; see that rank's error.\n"
    else:
        text = f"{'' if failure.expected else failure.traceback}error: {failure.sentence()}\n"
    outcry.write(f"{text}  (rank {failure.rank}; its output is in {log})\n")
    outcry.flush()


class _Lossy(io.FileIO):
    """Drops what a full disk does not take: a line that is lost from a log ends no training and hides no failure."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _lossy_stream(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def die_with(launcher: int | None) -> None:
    """See to it that this process does not outlive the one that started it, however that one ends.

    Args:
        launcher: its process id; None: the system cannot tell it, and ranks do not look for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if launcher is None:
        return
    if os.getppid() != launcher:
        os._exit(1)  # it died before we could ask to be told
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(launcher,), name="weft-parent-watch", daemon=True).start()


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)


def name_process(name: str) -> None:
    """Show `name`, of at most 15 bytes, where `ps` and `top` list the names of processes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(said: str = "") -> None:
    """Entry of a rank that `weft train` started. said: what was written while its modules were loaded before it."""
    run_dir = Path(sys.argv[1])
    place, line = env.rank_env(), launcher_line()
    if place is None or line is None:
        sys.exit("error: this module is part of `weft train`, which sets RANK and WEFT_LINE. Run: weft train.")
    name_process(f"weft-rank-{place.rank}")

    alarm = second_handle(2)  # where a rank tells that it waits for another, when the first cannot

    def body(terminal: TextIO | None) -> object:
        print(said, end="", file=sys.stderr)
        # torch loads here, behind the redirection, so that its warnings land in the log; in a fork it is there.
        with busy(terminal, "loading torch"):
            from weft.train.engine import ReplicaWorld
            from weft.train.folder import RunFolder
            from weft.train.rank_run import Start, run_rank
            from weft.train.torch_engine import TorchEngine  # noqa: F401 - the slow part, told by `busy`

        given = json.loads(line.settings)
        run = RunFolder(run_dir, given["texts"])
        copies = CopyHome(**given["copies"]) if given["copies"] else None
        command = tuple(given["command"])
        world = ReplicaWorld(**given["world"]) if given["world"] else None
        start = Start(locked=True, began=given["started"], alarm=alarm, command=command, copies=copies, world=world)
        start = replace(start, store_key=given["store_key"])
        return run_rank(run, place, terminal, start)

    run_as_rank(run_dir / "logs", place, body, line)
    gc.freeze()  # as in cli/app.py: ending takes no second


if __name__ == "__main__":
    main()
