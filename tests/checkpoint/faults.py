"""Run code in a forked process that is killed, or fails, at its n-th file system call."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from weft.checkpoint.save import save_checkpoint

FAILED = 3
DONE = 0
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.fsync"}


def in_fork(action: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> int:
    """Return the exit status of a forked process that runs `action`. A negative value is the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            prepare()
            status = action()
            status = DONE if not isinstance(status, int) else status
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fault_at_call(root: Path, call: int, fault: Callable[[], None]) -> Callable[[], None]:
    """Return a `prepare` for `in_fork` that triggers `fault` before the n-th event on files in `root`."""
    seen = 0
    fsync = os.fsync

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _EVENTS and (event == "os.fsync" or str(arguments[0]).startswith(str(root))):
            seen += 1
            if seen == call:
                fault()

    def counted_fsync(handle: int) -> None:
        count("os.fsync", ())
        fsync(handle)

    def prepare() -> None:
        os.fsync = counted_fsync
        sys.addaudithook(count)

    return prepare


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def content(step: int, tag: str = "first") -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    weight = torch.arange(1000, dtype=torch.float32) + step + (0.5 if tag == "second" else 0.0)
    return {"model": {"w": weight, "b": weight[:3].clone()}, "optimizer": {"m": weight * 2}}, {"step": step, "tag": tag}


def save(root: Path, step: int, tag: str = "first") -> Path:
    return save_checkpoint(root, step, *content(step, tag))


def names(root: Path) -> list[str]:
    """List the checkpoint folder without the lock file."""
    return sorted(name for name in os.listdir(root) if name != ".lock")
