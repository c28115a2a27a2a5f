"""One call of a function in a warm process, with a time limit. Runs in a thread or process of any executor."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from weft.env import child_env

#: Bytes at the start and at the end of a task's output that are kept.
KEPT_OUTPUT_BYTES = 32 * 1024
#: Seconds for the import of the function's module.
LOAD_LIMIT_S = 600.0
#: Seconds between two checks whether a process lives whose children hold its pipes open.
_CHECK_S = 0.2
#: Bytes read after an answer. A pipe holds at most this much; a process that the function left may write on.
_MAX_DRAINED = 2**20
_PROGRAM = "from weft.pools.worker import main; main()"


@dataclass(frozen=True, slots=True)
class MapJob:
    """A function and the limits of its calls, sent as JSON.

    Attributes:
        token: identifies the pool, for `stop`.
        function: package.module:function or path/to/file.py:function.
        cwd, path: working folder and import path.
        timeout_s: seconds of a call, or None.
    """

    token: str
    function: str
    cwd: str
    path: tuple[str, ...]
    timeout_s: float | None

    def text(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))


class Ended(Exception):
    """The process died or was killed after its time limit. `kind` is "died" or "timeout"."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Output:
    """The first and last bytes of an output of any length."""

    def __init__(self) -> None:
        self._head, self._tail, self._total = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        """Append bytes, and discard those in the middle."""
        self._total += len(chunk)
        free = KEPT_OUTPUT_BYTES - len(self._head)
        self._head += chunk[:free]
        self._tail += chunk[free:] if free > 0 else chunk
        if len(self._tail) > 2 * KEPT_OUTPUT_BYTES:
            del self._tail[:-KEPT_OUTPUT_BYTES]

    def text(self) -> str:
        """Return the kept output."""
        tail = bytes(self._tail[-KEPT_OUTPUT_BYTES:])
        left_out = self._total - len(self._head) - len(tail)
        middle = f"\n[{left_out} bytes left out]\n" if left_out else ""
        return self._head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")


class WorkerProcess:
    """A process of `weft.pools.worker` in its own session.

    Args:
        cores: cores that it may use; empty for all.
        variables: further environment variables.
    """

    def __init__(self, cores: Sequence[int], variables: dict[str, str]):
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(lifeline), ",".join(map(str, cores))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=child_env(**variables), start_new_session=True, pass_fds=[lifeline],
            )  # fmt: skip
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        pipes: Any = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._requests, self._answers, self._output = pipes
        os.set_blocking(self._output.fileno(), False)
        self._job = ""

    def is_alive(self) -> bool:
        """Return True if the process has not ended."""
        return self._process.poll() is None

    def call(self, job: str, item: str, timeout_s: float | None, output: Output) -> dict[str, Any]:
        """Return the answer for one item. Load the job's function first, unless the last call did.

        Raises:
            Ended: if the process dies, or is killed after `timeout_s` seconds of the call.
        """
        if job != self._job:
            answer = self._request(f"load {job}", LOAD_LIMIT_S, output)
            if "ready" not in answer:
                return answer
            self._job = job
        return self._request(f"call {item}", timeout_s, output)

    def _request(self, line: str, limit_s: float | None, output: Output) -> dict[str, Any]:
        end = None if limit_s is None else time.monotonic() + limit_s
        with suppress(OSError):  # it has died, which `_receive` reports
            self._requests.write(line.encode() + b"\n")
            self._requests.flush()
        text = self._receive(end, limit_s, output)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Ended("died", "its worker sent a damaged answer")
        return answer

    def _receive(self, end: float | None, limit_s: float | None, output: Output) -> bytes:
        answers, printed, answer = self._answers.fileno(), self._output.fileno(), bytearray()
        poller = select.poll()
        for descriptor in (answers, printed):
            poller.register(descriptor, select.POLLIN)
        while True:
            wait_s = _CHECK_S if end is None else max(0.0, min(_CHECK_S, end - time.monotonic()))
            ready = [descriptor for descriptor, _ in poller.poll(1000 * wait_s)]
            if printed in ready and not self._read_output(output, 2**16):
                poller.unregister(printed)
            chunk = os.read(answers, 2**16) if answers in ready else b""
            answer += chunk
            if answer.endswith(b"\n"):
                self._read_output(output, _MAX_DRAINED)
                return bytes(answer)
            if (answers in ready and not chunk) or (answers not in ready and not self.is_alive()):
                self._read_output(output, _MAX_DRAINED)
                raise Ended("died", self._death())
            if end is not None and time.monotonic() >= end:
                raise Ended("timeout", f"it took more than {limit_s:g} s and was killed")

    def _read_output(self, output: Output, most: int) -> bool:
        """Read available output, at most `most` bytes. Return False at its end."""
        while most > 0:
            try:
                chunk = os.read(self._output.fileno(), 2**16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            output.add(chunk)
            most -= len(chunk)
        return True

    def _death(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "its worker closed its pipes"
        if code >= 0:
            return f"its worker ended with exit code {code}"
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        return f"its worker was killed by {name}" + (", as the system does without memory" if name == "SIGKILL" else "")

    def kill(self) -> None:
        """Kill the process and the processes of its session."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and release its pipes. Only the thread that calls the function may do this."""
        self.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers, self._output):
            with suppress(OSError):
                pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def __del__(self) -> None:
        if hasattr(self, "_output"):
            self.close()


class _Thread(threading.local):
    """The worker of a thread, and the cores and variables that an engine assigned to it."""

    worker: WorkerProcess | None = None
    token = ""
    cores: tuple[int, ...] = ()
    variables: dict[str, str] = {}  # noqa: RUF012 (replaced, never changed)


_THREAD = _Thread()
_LOCK = threading.Lock()
_WORKERS: dict[str, set[WorkerProcess]] = {}
_STOPPED: set[str] = set()


def assign(cores: tuple[int, ...], variables: dict[str, str]) -> None:
    """Set cores and environment variables of the workers that this thread starts."""
    _THREAD.cores, _THREAD.variables = cores, variables


def stop(token: str) -> None:
    """Kill all workers of a pool in this process, and let no new ones start."""
    with _LOCK:
        _STOPPED.add(token)
        for worker in _WORKERS.pop(token, ()):
            worker.kill()


def run_tasks(job: str, items: Sequence[str]) -> list[str]:
    """Call a job's function with each item in this thread's worker, and return the outcomes as JSON.

    An outcome has "result", or "kind" ("raised", "unusable", "died" or "timeout") with "error" and perhaps
    "traceback". It also has "seconds" and "output".

    Args:
        job: `MapJob.text()`.
        items: the items as JSON, each on one line.
    """
    return [_run_task(job, item) for item in items]


def _run_task(job: str, item: str) -> str:
    settings, output, began = json.loads(job), Output(), time.monotonic()
    try:
        answer = _worker(settings["token"]).call(job, item, settings["timeout_s"], output)
    except Ended as error:
        answer = {"error": str(error), "kind": error.kind}
        _release()
    if "unusable" in answer:
        answer = {"error": answer["unusable"], "kind": "unusable"}
    elif "error" in answer:
        answer = {"kind": "raised", **answer}
    return json.dumps({**answer, "seconds": round(time.monotonic() - began, 6), "output": output.text()})


def _worker(token: str) -> WorkerProcess:
    worker = _THREAD.worker
    if worker is not None and worker.is_alive() and _THREAD.token == token:
        return worker
    _release()
    with _LOCK:
        if token in _STOPPED:
            raise Ended("died", "the pool was closed")
        worker = WorkerProcess(_THREAD.cores, _THREAD.variables)
        _WORKERS.setdefault(token, set()).add(worker)
    _THREAD.worker, _THREAD.token = worker, token
    return worker


def _release() -> None:
    worker, _THREAD.worker = _THREAD.worker, None
    if worker is not None:
        with _LOCK:
            _WORKERS.get(_THREAD.token, set()).discard(worker)
        worker.close()
