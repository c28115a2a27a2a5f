"""One rank's process: `python -m weft.cli.rank RUN_DIR [WORDS that the user typed]`, started by the launcher.

What compiled code prints goes past sys.stdout, so the streams are redirected at the file descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from weft import env
from weft.cli.failure import Failure, error_path, log_path, write_failure
from weft.env import RankEnv

_PR_SET_PDEATHSIG = 1

#: What a rank runs; it gets the terminal on rank 0 and None on the others.
RankBody = Callable[[TextIO | None], object]


def run_as_rank(logs: Path, place: RankEnv, body: RankBody) -> None:
    """Run `body` as one rank; on failure leave a record in `logs` and end the process with the error's exit code.

    From here on, file descriptors 1 and 2 lead to logs/rank_N.log. The process dies with its launcher.
    """
    _die_with_launcher()
    logs.mkdir(parents=True, exist_ok=True)
    error_path(logs, place.rank).unlink(missing_ok=True)
    terminal, outcry = _redirect(log_path(logs, place.rank), place)
    try:
        body(terminal)
    # Whatever ends a rank is recorded, SystemExit and Ctrl-C too: this is the last frame of the process.
    except BaseException as error:
        failure = Failure.from_exception(place.rank, error)
        if failure.exit_code == 0:
            _flush()
            os._exit(0)
        write_failure(logs, failure)
        print(failure.traceback, file=sys.stderr)
        if outcry is not None:
            _tell(outcry, failure, log_path(logs, place.rank))
        _flush()
        # A thread that waits on a dead peer would keep a normal exit from ending.
        os._exit(failure.exit_code)
    _flush()


def _redirect(log: Path, place: RankEnv) -> tuple[TextIO | None, TextIO | None]:
    """Send descriptors 1 and 2 to the log; returns what they were: (stdout of rank 0, stderr without our launcher).

    The old stderr is where a rank of torchrun or srun says itself why it failed.
    """
    _flush()
    terminal = _second_handle(1) if place.rank == 0 else None
    outcry = _second_handle(2) if place.starter != "weft" else None
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        # Only the interpreter's own streams can be set; a test's replacement writes where the test wants.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable(file=2)
    clock = time.strftime("%Y-%m-%d %H:%M:%S%z")
    os.write(1, f"--- rank {place.rank} of {place.world_size}, pid {os.getpid()}, {clock} ---\n".encode())
    return terminal, outcry


def _second_handle(descriptor: int) -> TextIO:
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="replace")


def _tell(outcry: TextIO, failure: Failure, log: Path) -> None:
    if failure.lost_peer:
        text = f"rank {failure.rank} lost the other ranks; one of them says why.\n"
    else:
        text = f"{'' if failure.expected else failure.traceback}error: {failure.sentence()}\n"
    outcry.write(f"{text}  (rank {failure.rank}; its output is in {log})\n")
    outcry.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _die_with_launcher() -> None:
    """See to it that this process does not outlive the one that started it, however that one ends."""
    launcher = env.launcher_pid()
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


def main() -> None:
    """Entry of a rank that `weft train` started."""
    run_dir = Path(sys.argv[1])
    place = env.rank_env()
    if place is None:
        sys.exit("error: weft.cli.rank is started by `weft train`, with RANK and WORLD_SIZE set. Run: weft train.")

    def body(terminal: TextIO | None) -> object:
        # torch loads here, behind the redirection, so that its warnings land in the log.
        from weft.train import run_rank

        return run_rank(run_dir, place, terminal, sys.argv[2:])

    run_as_rank(run_dir / "logs", place, body)
    gc.freeze()  # as in main.py: ending takes no second


if __name__ == "__main__":
    main()
