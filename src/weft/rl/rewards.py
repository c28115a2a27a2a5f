"""Reward functions in processes of their own, with a time limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from weft.env import child_env
from weft.rl.reward_worker import write_message


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of all completions by one function. nan: the completion has none. error: the first reason, or ""."""

    values: list[float]
    error: str = ""


class RewardProcess:
    """Calls one reward function in a separate process, which starts at the first call.

    Args:
        source: the function as path/to/file.py:function or package.module:function.
        limit_s: seconds that a call may take. The process and its children are killed afterwards.
    """

    def __init__(self, source: str, limit_s: float):
        self.source, self._limit_s = source, limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, values: Mapping[str, Any]) -> None:
        """Begin a call. A thread writes its arguments, because the process may be busy with imports."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "weft.rl.reward_worker", self.source]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_env(), start_new_session=True
            )
        stream = cast(BinaryIO, self._process.stdin)

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):
                write_message(stream, dict(values))

        threading.Thread(target=write, name="weft-reward-call", daemon=True).start()

    def finish(self, number: int, began: float) -> Rewards:
        """Return the rewards of `number` completions. began: start of the call, in time.monotonic."""
        answer = self._answer(began + self._limit_s)
        if "error" in answer:
            return Rewards([math.nan] * number, answer["error"])
        values = [math.nan if one is None else one for one in answer["values"]]
        missing = next((place for place, one in enumerate(values) if math.isnan(one)), None)
        return Rewards(values, "" if missing is None else f"completion {missing} has no finite reward")

    def _answer(self, end: float) -> dict[str, Any]:
        head = self._read(8, end)
        text = self._read(int.from_bytes(head, "little"), end) if len(head) == 8 else b""
        try:
            return json.loads(text)
        except ValueError:
            is_late = time.monotonic() >= end
            code = self.close()
            if is_late:
                return {"error": f"it took more than {self._limit_s:g} s and was killed"}
            return {"error": f"its process ended with exit code {code}"}

    def _read(self, size: int, end: float) -> bytes:
        """Read `size` bytes. Return fewer if the process ends, or at the time `end`."""
        assert self._process is not None
        stream, found = cast(BinaryIO, self._process.stdout), bytearray()
        descriptor = stream.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(found) < size and selector.select(max(0.0, end - time.monotonic())):
                part = os.read(descriptor, size - len(found))
                if not part:
                    break
                found += part
        return bytes(found)

    def close(self) -> int | None:
        """Kill the process and its children, and return its exit code. Does nothing without a process."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # it may be about to end
        code = process.poll()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return code


class RewardFunctions:
    """The reward functions of a run. All of them work at the same time.

    Args:
        sources: functions by name.
        limit_s: seconds that a call may take.
    """

    def __init__(self, sources: Sequence[str], limit_s: float):
        self._processes = [RewardProcess(source, limit_s) for source in sources]
        #: Ends the processes. Also called when this object is deleted.
        self.close = weakref.finalize(self, _close, self._processes)

    def call(self, values: Mapping[str, Sequence[Any]]) -> list[Rewards]:
        """Return the rewards of each function. values: lists by the name of a parameter, one entry per completion."""
        began = time.monotonic()
        for one in self._processes:
            one.start(values)
        return [one.finish(len(values["completions"]), began) for one in self._processes]


def _close(processes: Sequence[RewardProcess]) -> None:
    for one in processes:
        one.close()
