"""Failure records of ranks, and the choice of the first among several failures.

A failing rank sends its record to the launcher over a socket (switchboard.py) and writes `logs/rank_N.error.json`, if
its disk has space. A killed rank can do neither. The launcher combines both kinds with the time at which each process
ended, and reports the first one: when a rank ends, its neighbors lose their connections shortly after, and their errors
are only consequences.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import ActionAsked, CommError, WeftError

#: Error types, and parts of RuntimeError texts (gloo), that indicate that another rank has ended.
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")
_LOST_PEER_TEXTS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout")


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure record of one rank.

    Attributes:
        exit_code: exit code of the process; negative for the number of the signal that ended it.
        kind: name of the exception's type, or "" if the rank left no record.
        expected: whether the error is a WeftError, whose message suffices without a traceback.
        lost_peer: whether the error indicates that another rank has ended.
        when: seconds since the epoch.
        first_bad: first bad step of a run that halted, counted from 1.
        in_data: whether the data of `step` caused the exception.
        action: the request that ended training, if any.
    """

    rank: int
    exit_code: int
    kind: str = ""
    message: str = ""
    traceback: str = ""
    expected: bool = False
    lost_peer: bool = False
    step: int | None = None
    when: float = 0.0
    first_bad: int | None = None
    in_data: bool = False
    action: str = ""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> Failure:
        """Return the record of an exception that ends this rank."""
        expected = isinstance(error, WeftError)
        step = getattr(error, "step", None)
        lost = isinstance(error, CommError) or type(error).__name__ in _LOST_PEER_TYPES
        if isinstance(error, RuntimeError | OSError):
            lost = lost or any(part in str(error).lower() for part in _LOST_PEER_TEXTS)
        return cls(
            rank=rank,
            exit_code=exit_code_of(error),
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            expected=expected,
            lost_peer=lost,
            step=step if isinstance(step, int) else None,
            when=time.time(),
            first_bad=getattr(error, "first_bad", None),
            in_data=getattr(error, "in_data", False),
            action=error.action if isinstance(error, ActionAsked) else "",
        )

    def sentence(self) -> str:
        """Return a one-sentence description, or the full message of a WeftError."""
        at_step = f" at step {self.step}" if self.step is not None else ""
        if self.expected:
            return self.message
        if self.kind == "SystemExit":
            return f"rank {self.rank} exited with code {self.exit_code}{at_step}: it called sys.exit."
        if self.kind:
            first_line = self.message.strip().splitlines()[0] if self.message.strip() else ""
            return f"rank {self.rank} failed{at_step}: {self.kind}{': ' if first_line else ''}{first_line}"
        if self.exit_code < 0:
            return f"rank {self.rank} was killed by signal {_signal_text(-self.exit_code)}"
        return f"rank {self.rank} exited with code {self.exit_code} without reporting why."


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an exception: the code of a WeftError or SystemExit, 130 for Ctrl-C, else 1."""
    if isinstance(error, WeftError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def error_path(logs: Path, rank: int) -> Path:
    """Return the file to which a rank writes its failure."""
    return logs / f"rank_{rank}.error.json"


def log_path(logs: Path, rank: int) -> Path:
    """Return the file with a rank's standard output and error."""
    return logs / f"rank_{rank}.log"


def write_failure(logs: Path, failure: Failure) -> None:
    """Write the record next to the rank's log, atomically. On a full disk no record is written."""
    path = error_path(logs, failure.rank)
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(asdict(failure), indent=1), encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def first_failure(failures: list[Failure]) -> Failure:
    """Return the earliest failure that is not the consequence of another."""
    # These ranks failed as a consequence: the launcher sends SIGTERM, and gloo's threads abort when a peer has ended.
    ended = [each for each in failures if not each.kind and -each.exit_code in (signal.SIGTERM, signal.SIGABRT)]
    return min(failures, key=lambda failure: (failure.lost_peer or failure in ended, failure.when))


def _signal_text(number: int) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else "unknown"
    causes = {
        "SIGKILL": "Is the machine out of memory? Look at `dmesg`; use a smaller train.global_batch or model.",
        "SIGBUS": "Is /dev/shm or the disk full? `weft doctor` shows both.",
        "SIGSEGV": "Compiled code crashed; the log has the Python stack.",
        "SIGABRT": "Compiled code aborted; the log has its last output.",
        "SIGTERM": "Another program sent it a stop signal.",
    }
    return f"{number} ({name}). {causes.get(name, '')}".rstrip()
