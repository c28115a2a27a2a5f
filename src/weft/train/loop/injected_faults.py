"""Injection of the fault that `weft drill` requested: once, into one rank, at a step. Inactive outside drills.

A marker file is created when the fault happens, so that a restarted rank does not repeat it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import env
from weft.checkpoint.load import list_checkpoints
from weft.comm.rank_positions import members_of
from weft.config.plan import Plan
from weft.monitor.events import StepRecord
from weft.train.engine import Engine
from weft.train.folder import RunFolder
from weft.train.hooks import Hook
from weft.train.tasks.base import Task
from weft.units import parse_seconds

_SLOW_STEPS, _SLOW_S = 3, 0.7
_JUMP_S = 3600.0
#: Number of writes that fail with a read-only folder, fewer than a save's attempts.
_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject.

    Attributes:
        kind: a name in ACTS, or "kill_in_save", "nan_gradient" or "loader".
        step: the earliest step at which it happens, counted from 1.
        rank: the rank in which it happens.
        mark: path of the marker file.
        world_size: world size of the run that was started.
    """

    kind: str
    step: int
    rank: int
    mark: str
    world_size: int

    @property
    def happened(self) -> bool:
        return Path(self.mark).exists()

    def happens(self, step: int) -> None:
        """Write the marker file of the fault, with time and step."""
        draft = Path(f"{self.mark}.{os.getpid()}")
        draft.write_text(json.dumps({"step": step, "time": time.time()}))
        os.replace(draft, self.mark)


def asked_fault(rank: int, plan: Plan) -> Fault | None:
    """Return the fault that `weft drill` injects into this rank, or None.

    A fault that has happened is not repeated, except lose_rank. All ranks of the pipeline get nan_gradient, because any
    of them may compute the loss.
    """
    text = env.get("WEFT_DRILL")
    if not text:
        return None
    fault = Fault(**json.loads(text))
    lasting = fault.kind == "lose_rank"
    hit = members_of(plan, fault.rank, ("pp",)) if fault.kind == "nan_gradient" else (fault.rank,)
    return fault if rank in hit and (lasting or not fault.happened) else None


class FaultHook(Hook):
    """Hook that injects the fault at its step.

    Args:
        fault: the fault to inject.
        task: the run's task.
        folder: the run's folder.
    """

    def __init__(self, fault: Fault, task: Task, folder: RunFolder):
        self.fault, self.folder, self.engine = fault, folder, None
        self._next = 0
        if fault.kind == "nan_gradient":
            setattr(task, "loss", self._spoiling(task.loss))  # noqa: B010

    def watch(self, engine: Engine) -> FaultHook:
        """Keep the built engine. For the fault "loader", replace its `batches.iterate`. Return self."""
        self.engine = engine
        if self.fault.kind == "loader":
            iterate: Callable[..., Any] = engine.batches.iterate
            setattr(engine.batches, "iterate", lambda *args: self._torn(iterate, *args))  # noqa: B010
        return self

    def on_start(self, start_step: int) -> None:
        self._next = start_step + 1
        world_size = 0 if self.engine is None else self.engine.plan.world_size
        if self.fault.kind == "lose_rank" and self.fault.happened and world_size == self.fault.world_size:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_phase(self, name: str) -> None:
        if name == "saving" and self.fault.kind == "kill_in_save" and self._due(self._next - 1):
            self.fault.happens(self._next - 1)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(self, record: StepRecord) -> str | None:
        self._next = record.step + 1
        act = ACTS.get(self.fault.kind)
        if act is not None and self._due(record.step):
            if self.fault.kind in DAMAGES and len(list_checkpoints(self.folder.checkpoints)) < 2:
                return None  # an older one must exist to return to
            self.fault.happens(record.step)
            act(self)
        return None

    def _due(self, step: int) -> bool:
        return step >= self.fault.step and not self.fault.happened

    def _spoiling(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loss)  # also copies the mark for losses from a sharded head
        def spoilt(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            found = loss(*args, **kwargs)
            if not self._due(self._next):
                return found
            self.fault.happens(self._next)
            return (found[0] * math.nan, *found[1:])

        return spoilt

    @contextlib.contextmanager
    def _torn(self, iterate: Callable[..., Any], *args: int) -> Iterator[Iterator[Any]]:
        def read(steps: Iterator[Any]) -> Iterator[Any]:
            for batches in steps:
                if self._due(self._next):
                    self.fault.happens(self._next)
                    raise ValueError("drill: a record of the data cannot be read")
                yield batches

        with iterate(*args) as steps:
            yield read(iter(steps))


def _kill(hook: FaultHook, signum: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(5.0)  # handled signals arrive between two instructions


def _to_launcher(hook: FaultHook, signum: int) -> None:
    launcher = env.launcher_pid()
    if launcher is not None:
        os.kill(launcher, signum)


def _raise(error: BaseException) -> None:
    raise error


def _spoil_weight(hook: FaultHook) -> None:
    for parameter in getattr(hook.engine, "model").parameters():  # noqa: B009 - an engine of torch has one
        held = getattr(parameter, "to_local", lambda own=parameter: own)().detach()
        if held.numel():
            held.fill_(math.nan)  # a single element may be in a row that no token uses
            return


def _read_only(hook: FaultHook) -> None:
    make, left = os.mkdir, [_REFUSALS]

    def refused(path: Any, *args: Any, **kwargs: Any) -> None:
        if left[0] and "checkpoints" in os.fspath(path):
            left[0] -= 1
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        make(path, *args, **kwargs)

    os.mkdir = refused


def _jump(hook: FaultHook, seconds: float) -> None:
    now = time.time
    time.time = lambda: now() + seconds


def _break_network(hook: FaultHook) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.shutdown(socket.SHUT_RDWR)


def _wait_for_second(hook: FaultHook) -> None:
    """Wait, for less than the ranks' timeout, until the drill reports the end of the second command."""
    end = time.monotonic() + 0.8 * parse_seconds(hook.folder.config().launch.timeout)
    while not Path(f"{hook.fault.mark}.over").exists() and time.monotonic() < end:
        time.sleep(0.02)


def _damage(hook: FaultHook, how: Callable[[Path], None]) -> None:
    how(Path(str(list_checkpoints(hook.folder.checkpoints)[-1])))
    os.kill(os.getpid(), signal.SIGKILL)


def _largest(checkpoint: Path) -> Path:
    return max(checkpoint.glob("**/*.safetensors"), key=lambda path: path.stat().st_size)


def _flip(checkpoint: Path) -> None:
    path = _largest(checkpoint)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


#: Functions that damage the newest checkpoint, by kind of fault.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip_byte": _flip,
    "truncate": lambda path: os.truncate(_largest(path), _largest(path).stat().st_size // 2),
    "lose_file": lambda path: _largest(path).unlink(),
    "lose_manifest": lambda path: (path / "manifest.json").unlink(),
    "lose_commit": lambda path: (path / "COMMIT").unlink(),
}

#: Actions after a step, by kind of fault. Other kinds act at other times.
ACTS: dict[str, Callable[[FaultHook], None]] = {
    "kill_rank": _kill,
    "segfault": lambda hook: _kill(hook, signal.SIGSEGV),
    "abort": lambda hook: _kill(hook, signal.SIGABRT),
    "terminate_rank": lambda hook: os.kill(os.getpid(), signal.SIGTERM),
    "leave": lambda hook: os._exit(7),
    "exception": lambda hook: _raise(RuntimeError("drill: an exception in a step")),
    "memory": lambda hook: _raise(MemoryError("drill: no memory")),
    "stop_rank": lambda hook: _kill(hook, signal.SIGSTOP),
    "hang": lambda hook: time.sleep(1e6),
    "slow_rank": lambda hook: time.sleep(_SLOW_S * _SLOW_STEPS),
    "cut_link": _break_network,
    "nan_weight": _spoil_weight,
    # A limit on the size of files has the effect of a full disk, and needs no root rights.
    "full_disk": lambda hook: resource.setrlimit(
        resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    ),
    "read_only": _read_only,
    "clock_forward": lambda hook: _jump(hook, _JUMP_S),
    "clock_back": lambda hook: _jump(hook, -_JUMP_S),
    "kill_launcher": lambda hook: _to_launcher(hook, signal.SIGKILL),
    "stop_launcher": lambda hook: _to_launcher(hook, signal.SIGSTOP),
    "terminate": lambda hook: _to_launcher(hook, signal.SIGTERM),
    "lose_rank": _kill,
    "two_runs": _wait_for_second,
    **{name: (lambda hook, how=how: _damage(hook, how)) for name, how in DAMAGES.items()},
}
