"""Reward functions in separate processes, with a time limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.env import child_env


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of all completions by one function, nan for a missing one. error: the first reason, or ""."""

    values: list[float]
    error: str = ""


class RewardProcess:
    """Calls one reward function in a separate process, which starts at the first call.

    Args:
        source: the function as path/to/file.py:function or package.module:function.
        limit_s: seconds that a call may take. The process and its children are killed afterwards.
    """

    def __init__(self, source: str, limit_s: float):
        self._source, self._limit_s = source, limit_s
        self._process: subprocess.Popen[str] | None = None
        self._answer = ""

    def start(self, text: str) -> threading.Thread:
        """Begin a call in a thread, because the process may not read its input. text: the arguments as JSON."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.rl.reward_worker", self._source], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env=child_env(), text=True, start_new_session=True,
            )  # fmt: skip
        thread = threading.Thread(target=self._call, args=(self._process, text), name="weft-reward", daemon=True)
        self._answer = ""
        thread.start()
        return thread

    def _call(self, process: Any, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was killed
            print(text, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            self._answer = answer if process is self._process else self._answer

    def finish(self, thread: threading.Thread, end: float, number: int) -> Rewards:
        """Return the rewards of `number` completions. end: when the call must be done, in time.monotonic."""
        thread.join(max(0.0, end - time.monotonic()))
        is_late = thread.is_alive()
        code = self.close() if is_late or not self._answer else None
        if is_late:
            return Rewards([math.nan] * number, f"it took more than {self._limit_s:g} s and was killed")
        answer: Any = (
            json.loads(self._answer) if self._answer else {"error": f"its process ended with exit code {code}"}
        )
        if "error" in answer:
            return Rewards([math.nan] * number, answer["error"])
        values = [math.nan if one is None else one for one in answer["values"]]
        missing = next((place for place, one in enumerate(values) if math.isnan(one)), None)
        return Rewards(values, "" if missing is None else f"completion {missing} has no finite reward")

    def close(self) -> int | None:
        """Kill the process and its children, and return its exit code. Does nothing without a process."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # it may be about to end
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError), process:  # closes its pipes
            return process.wait()
        return None


class RewardFunctions:
    """The reward functions of a run. All of them work at the same time.

    Args:
        sources: the functions.
        limit_s: seconds that a call may take.
    """

    def __init__(self, sources: Sequence[str], limit_s: float):
        self._processes, self._limit_s = [RewardProcess(source, limit_s) for source in sources], limit_s
        #: Ends the processes. Also called when this object is deleted.
        self.close = weakref.finalize(self, _close, self._processes)

    def call(self, values: Mapping[str, Sequence[Any]]) -> list[Rewards]:
        """Return the rewards of each function. values: lists by the name of a parameter, one entry per completion."""
        end, text = time.monotonic() + self._limit_s, json.dumps(dict(values), default=str)
        threads = [one.start(text) for one in self._processes]
        number = len(values["completions"])
        return [one.finish(thread, end, number) for one, thread in zip(self._processes, threads, strict=True)]


def _close(processes: Sequence[RewardProcess]) -> None:
    for one in processes:
        one.close()
