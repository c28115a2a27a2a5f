"""What a failing rank leaves behind, and which of several failures came first.

A rank that fails tells its launcher over their line (switchboard.py) and leaves `logs/rank_N.error.json`, where its
disk has room; one that is killed can do neither. The launcher joins both kinds, with the time at which it saw each
process end, and shows the one that began it: when a rank goes, its neighbours lose their connection a moment later, and
their errors are only consequences.
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

#: Error types, and pieces of RuntimeError texts (gloo), that mean: another rank is gone.
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")
_LOST_PEER_TEXTS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout")


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed.

    exit_code: of the process; negative for the number of the signal that ended it.
    kind: the exception's type name, "" where the rank left no word.
    expected: raised on purpose (a WeftError), so that its sentence is all that is needed.
    when: seconds since the epoch. first_bad: of a run that halted, its first bad step, counted from 1. in_data: the
    exception came from the data of `step`. action: what the run was asked for, where it left its loop for that.
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
        """The record of an exception that ends this rank."""
        expected = isinstance(error, WeftError)
        step = getattr(error, "step", None)
        return cls(
            rank=rank,
            exit_code=exit_code_of(error),
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            expected=expected,
            lost_peer=_lost_peer(error),
            step=step if isinstance(step, int) else None,
            when=time.time(),
            first_bad=getattr(error, "first_bad", None),
            in_data=getattr(error, "in_data", False),
            action=error.action if isinstance(error, ActionAsked) else "",
        )

    def sentence(self) -> str:
        """What happened, as one sentence (or the several of a WeftError)."""
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
    """Return the exit code a process ends with for this exception: a WeftError's own, 130 for Ctrl-C, else 1."""
    if isinstance(error, WeftError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def error_path(logs: Path, rank: int) -> Path:
    """The file in which a rank says why it failed."""
    return logs / f"rank_{rank}.error.json"


def log_path(logs: Path, rank: int) -> Path:
    """The file that holds what a rank wrote to its standard output and error."""
    return logs / f"rank_{rank}.log"


def write_failure(logs: Path, failure: Failure) -> None:
    """Leave the record beside the rank's log, whole or not at all: on a full disk there is none."""
    path = error_path(logs, failure.rank)
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(asdict(failure), indent=1), encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def first_failure(failures: list[Failure]) -> Failure:
    """The failure that began it: the earliest that is not the consequence of another."""
    return min(failures, key=lambda failure: (_is_consequence(failure), failure.when))


def _is_consequence(failure: Failure) -> bool:
    # The launcher itself ends the other ranks with SIGTERM; gloo's threads abort when their peer is gone.
    return failure.lost_peer or (not failure.kind and -failure.exit_code in (signal.SIGTERM, signal.SIGABRT))


def _lost_peer(error: BaseException) -> bool:
    if isinstance(error, CommError) or type(error).__name__ in _LOST_PEER_TYPES:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(piece in text for piece in _LOST_PEER_TEXTS)


def _signal_text(number: int) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else "unknown"
    causes = {
        "SIGKILL": "Is the machine out of memory? Look at `dmesg`; use a smaller train.global_batch or model.",
        "SIGBUS": "Is /dev/shm or the disk full? `weft doctor` shows both.",
        "SIGSEGV": "Compiled code crashed; the log has the Python stack.",
        "SIGABRT": "Compiled code aborted; the log has its last output.",
        "SIGTERM": "Another program asked it to stop.",
    }
    return f"{number} ({name}). {causes.get(name, '')}".rstrip()
