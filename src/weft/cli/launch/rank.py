"""One rank's process: its log, its failure record, and the user's command line, which messages suggest to repeat."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from weft import env
from weft.checkpoint.peer_copies import CopyHome
from weft.cli.launch.failure import Failure, error_path, log_path, write_failure
from weft.cli.launch.switchboard import LauncherLine, launcher_line
from weft.env import RankEnv
from weft.monitor.terminal import busy
from weft.train.folder import restrict_new_files
from weft.train.loop.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from weft.private_torch import Store

#: Names of torchrun: the program, and its Python modules.
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def typed_command(argv: Sequence[str] | None = None, parent: Sequence[str] | None = None) -> list[str]:
    """Return this process's command line as the user typed it, or torchrun's for its ranks.

    By default both arguments are looked up. A rank cannot find the srun command that started it, so under srun the
    result is the rank's own command.

    Args:
        argv: command line of this process.
        parent: command line of the parent process.
    """
    argv = sys.argv if argv is None else argv
    if parent is None:
        import psutil

        parent = []
        with contextlib.suppress(psutil.Error):  # the parent is not readable, or has ended
            found = psutil.Process().parent()
            parent = found.cmdline() if found is not None else []
    for place, word in enumerate(parent):
        if word in _TORCHRUN or Path(word).name == "torchrun":
            launcher = ["torchrun"] if Path(word).name == "torchrun" else ["python", "-m", word]
            return [*launcher, *parent[place + 1 :]]
    name = Path(argv[0]).name
    program = ["python", "-m", "weft"] if name == "__main__.py" else [name]
    return [*program, *argv[1:]]


@dataclass(frozen=True, slots=True)
class RankInputs:
    """Inputs of one rank, as JSON values.

    Attributes:
        texts: contents of the run folder's files, as in `RunFolder`.
        began: time.monotonic at the start of the command.
        command: the command line of the user.
        copies: `CopyHome` of this host, if any.
        world: `ReplicaWorld` of this rank, if each replica has a separate process group world.
        store_key: secret that signs the ranks' messages in their store; empty if the ranks agree on a secret later.
    """

    texts: Mapping[str, str]
    began: float
    command: Sequence[str]
    copies: Mapping[str, Any] | None
    world: Mapping[str, Any] | None
    store_key: str = field(default="", repr=False)


def train_rank(
    run_dir: Path,
    rank: RankEnv,
    inputs: RankInputs,
    *,
    line: LauncherLine | None = None,
    store: Store | None = None,
    output: str = "",
) -> None:
    """Train one rank of a prepared run. On failure, report it and end the process with the error's exit code.

    Args:
        run_dir: the run's folder, which the launcher or rank 0 has locked.
        rank: the rank and the world size.
        inputs: inputs from the process that prepared the run.
        line: connection to the launcher, if `weft train` started the rank.
        store: rendezvous store that already connects the ranks.
        output: output of modules that were imported before, for the log.
    """
    alarm = second_handle(2)  # stream to report hangs, if rank 0 cannot

    def body(terminal: TextIO | None) -> object:
        print(output, end="", file=sys.stderr)
        # Import torch after the redirection, so that its warnings go to the log. In a fork it is already imported.
        with busy(terminal, "loading torch"):
            from weft.train.engine import ReplicaWorld
            from weft.train.engines.torch_engine import TorchEngine  # noqa: F401 - the slow part, told by `busy`
            from weft.train.folder import RunFolder
            from weft.train.rank_run import Start, run_rank

        start = Start(
            locked=True,
            began=inputs.began,
            alarm=alarm,
            store=store,
            command=tuple(inputs.command),
            copies=CopyHome(**inputs.copies) if inputs.copies else None,
            world=ReplicaWorld(**inputs.world) if inputs.world else None,
            store_key=inputs.store_key,
        )
        return run_rank(RunFolder(run_dir, inputs.texts), rank, terminal, start)

    run_as_rank(run_dir / "logs", rank, body, line)


# A rank's process: a fork of the server (fork_server.py), or `python -m weft.cli.launch.rank RUN_DIR`.

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

#: The function that a rank runs. It gets the terminal on rank 0 and None on the others.
RankBody = Callable[[TextIO | None], object]


def run_as_rank(logs: Path, place: RankEnv, body: RankBody, line: LauncherLine | None = None) -> None:
    """Run `body` as one rank. On failure, report it and end the process with the error's exit code.

    File descriptors 1 and 2 are redirected to logs/rank_N.log. The process dies with its launcher.
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
    # Record any exception, including SystemExit and Ctrl-C: this is the outermost function of the process.
    except BaseException as error:
        failure = Failure.from_exception(place.rank, error)
        if failure.exit_code != 0:
            _report(failure, logs, outcry, line)
        _flush()
        # A thread that waits for a dead peer would block a normal exit.
        os._exit(failure.exit_code)
    # Everything is saved, so ignore further signals to stop.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    _flush()


def _report(failure: Failure, logs: Path, outcry: TextIO | None, line: LauncherLine | None) -> None:
    if line is not None:
        line.report_failure(failure)
    with contextlib.suppress(OSError):
        if outcry is not None:
            _report_failure(outcry, failure, log_path(logs, failure.rank))
    if failure.action:
        print(failure.message, file=sys.stderr)  # not a failure, so there is no traceback or record
        return
    print(failure.traceback, file=sys.stderr)
    write_failure(logs, failure)


def _redirect(log: Path, place: RankEnv) -> tuple[TextIO | None, TextIO | None]:
    """Redirect file descriptors 1 and 2 to the log.

    Return the original stdout on rank 0 (else None), and the original stderr for ranks of torchrun or srun, which
    report failures there (else None).
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
    with contextlib.suppress(OSError):  # later writes report a full disk
        os.write(1, f"--- rank {place.rank} of {place.world_size}, pid {os.getpid()}, {clock} ---\n".encode())
    return terminal, outcry


def second_handle(descriptor: int) -> TextIO:
    """Return a text stream on a duplicate of a file descriptor. It is unaffected if the descriptor is redirected."""
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="replace")


def _report_failure(outcry: TextIO, failure: Failure, log: Path) -> None:
    if failure.lost_peer:
        text = f"rank {failure.rank} lost its connection to another rank; see that rank's error.\n"
    else:
        text = f"{'' if failure.expected else failure.traceback}error: {failure.sentence()}\n"
    outcry.write(f"{text}  (rank {failure.rank}; its output is in {log})\n")
    outcry.flush()


class _Lossy(io.FileIO):
    """A log file that drops writes to a full disk, so that a lost log line does not end training or hide a failure."""

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
    """Make this process die with its parent, however the parent ends.

    Args:
        launcher: the parent's process id; None if the system cannot provide it, to skip the check for a dead parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if launcher is None:
        return
    if os.getppid() != launcher:
        os._exit(1)  # the parent ended before prctl
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(launcher,), name="weft-parent-watch", daemon=True).start()


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)


def name_process(name: str) -> None:
    """Set the process name that `ps` and `top` list, at most 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(said: str = "") -> None:
    """Run a rank that `weft train` started. `said` is the output of modules that were imported before."""
    run_dir = Path(sys.argv[1])
    place, line = env.rank_env(), launcher_line()
    if place is None or line is None:
        sys.exit("error: this module is part of `weft train`, which sets RANK and WEFT_LINE. Run: weft train.")
    name_process(f"weft-rank-{place.rank}")
    train_rank(run_dir, place, RankInputs(**json.loads(line.settings)), line=line, output=said)
    gc.freeze()  # for a fast exit, as in cli/app.py


if __name__ == "__main__":
    main()
