"""Processes that decode a rank's images or audio ahead of use, into shared memory.

Samples are a function of (seed, epoch, index), so the result does not depend on the process, and decoding can be
repeated. If a process dies, it is replaced and its jobs run again. If three processes die on one sample, the error
names it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from weft import env
from weft.comm.gpu_settings import cores_of_rank
from weft.data.media.decode_worker import ANSWER, DONE, FAULTY, JOB, Decodable, described, in_slot, slot_bytes
from weft.errors import DataError
from weft.units import format_bytes

#: (epoch, index) of a sample.
Key = tuple[int, int]
#: Slots per process, in addition to one slot per requested sample.
_SPARE = 4
#: Number of processes that must die on a sample before it is reported as faulty.
_MOST_DEATHS = 3
#: Seconds after which a process without a response is killed, because its disk is gone or its decoder loops.
_LONGEST_JOB_S = 300.0
#: CPU time (s) after which a process is killed and its sample is faulty. It does not depend on the machine's load.
_MAX_DECODE_S = 20.0
_MOST_RING_BYTES = 512 * 2**20


class DecodePool:
    """Pool of processes that decode samples.

    Args:
        samples: the samples to decode.
        workers: number of processes.
        ahead: number of samples that are decoded before they are requested. It is reduced if the samples would take
            more than 512 MiB.

    Raises:
        DataError: if the shared memory cannot be allocated.
    """

    def __init__(self, samples: Decodable, workers: int, ahead: int):
        self._samples, size = samples, slot_bytes(samples)
        num_slots = max(workers * _SPARE, min(ahead + workers * _SPARE, _MOST_RING_BYTES // size))
        self._fd = _shared_memory(num_slots * size, workers, samples.smaller)
        self._memory = mmap.mmap(self._fd, num_slots * size)
        self._ring = np.frombuffer(self._memory, np.uint8).reshape(num_slots, size)
        self._free = list(range(num_slots))
        self._queue: deque[Key] = deque()
        self._done: dict[Key, int] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._faults: dict[Key, str] = {}
        self._deaths: Counter[Key] = Counter()
        self._selector = selectors.DefaultSelector()
        self._description = described(samples)
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._start()

    @property
    def pids(self) -> list[int]:
        """Ids of the decode processes."""
        return [worker.process.pid for worker in self._workers]

    def many(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[NDArray[Any]]:
        """Return copies of decoded samples, and decode others in the background.

        Samples of earlier calls that are in neither list are dropped.

        Args:
            wanted: (epoch, index) of each sample to return.
            soon: (epoch, index) of each sample to decode in the background.

        Raises:
            DataError: if a wanted sample cannot be decoded, or its decoding crashes the processes or takes too long.
        """
        needed = dict.fromkeys(wanted)
        for key in [key for key in self._done if key not in needed and key not in set(soon)]:
            self._free.append(self._done.pop(key))
        under_way = {key for worker in self._workers for key, _ in worker.jobs}
        under_way |= self._done.keys() | self._faults.keys()
        self._queue = deque(key for key in dict.fromkeys([*wanted, *soon]) if key not in under_way)
        found: dict[Key, NDArray[Any]] = {}
        while True:
            for key in self._faults.keys() & needed.keys():
                raise DataError(self._faults[key])
            for key in [key for key in self._done if key in needed and key not in found]:
                slot = self._done.pop(key)
                found[key] = in_slot(self._ring, slot, self._shapes[slot], self._samples.dtype).copy()
                self._free.append(slot)
            self._hand_out(needed)
            if len(found) == len(needed):
                return [found[key] for key in wanted]
            self._wait()

    def close(self) -> None:
        """Stop the processes and free the memory. Closing it again has no effect."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._selector.close()
        if self._fd >= 0:
            del self._ring
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    def _start(self) -> None:
        worker = _Worker(self._fd, len(self._ring), self._description)
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _hand_out(self, needed: dict[Key, None]) -> None:
        """Send jobs while slots are free, so that processes stay busy between calls.

        If no slot is free and no job is running, drop a decoded sample that is not needed.
        """
        if self._queue and not self._free and not any(worker.jobs for worker in self._workers):
            spare = next(key for key in self._done if key not in needed)
            self._free.append(self._done.pop(spare))
        while self._queue and self._free:
            worker = min(self._workers, key=lambda one: len(one.jobs))
            worker.send(self._queue.popleft(), self._free.pop())

    def _wait(self) -> None:
        """Wait up to 1 s for responses and process them. Replace processes that died.

        Without a response in that time, kill processes whose job takes too long.
        """
        ready = self._selector.select(timeout=1.0)
        for chosen, _ in ready:
            worker: _Worker = chosen.data
            alive = worker.receive()
            for slot, status, text in worker.answers():
                self._take(worker.done(slot), slot, status, text)
            if not alive:
                self._replace(worker)
        for worker in list(self._workers) if not ready else ():
            worker.end_if_hung()  # the closed pipe then wakes `select`

    def _take(self, key: Key, slot: int, status: int, text: str) -> None:
        if status == DONE:
            self._done[key], self._shapes[slot] = slot, tuple(json.loads(text))
            return
        self._free.append(slot)
        why = f"{self._named(key)}: it cannot be decoded ({text}). Repair it, or delete it."
        self._faults[key] = text if status == FAULTY else why

    def _replace(self, worker: _Worker) -> None:
        """Start a process for one that died, and queue its jobs again.

        The job that it was running becomes a fault if it took too much CPU time, or has killed three processes.
        """
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        code = worker.end()
        jobs = list(worker.jobs)
        self._free += [slot for _, slot in jobs]
        self._queue.extendleft(key for key, _ in reversed(jobs))
        if jobs:
            key = jobs[0][0]
            self._deaths[key] += 1
            if worker.is_slow:
                self._queue.remove(key)
                self._faults[key] = (
                    f"{self._named(key)}: its decoding took more than {_MAX_DECODE_S:.0f} s of processor time. Save it "
                    "smaller or in another format, or delete it."
                )
            elif self._deaths[key] >= _MOST_DEATHS:
                self._queue.remove(key)
                self._faults[key] = (
                    f"{self._named(key)}: {_MOST_DEATHS} processes ended while they decoded it, the last with "
                    f"{_how(code)}. Repair or delete it; if memory ran out, use fewer data.workers."
                )
        self._start()

    def _named(self, key: Key) -> str:
        return str(self._samples.source.file(key[1]))


class _Worker:
    """One decode process and its pending jobs, oldest first. It runs them in order."""

    def __init__(self, ring_fd: int, num_slots: int, told: bytes):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-m", "weft.data.media.decode_worker", str(ring_fd), str(num_slots)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(ring_fd,), bufsize=0,
            env={**env.bare_env(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self.output: Any = self.process.stdout
        self.jobs: deque[tuple[Key, int]] = deque()
        self.is_slow = False
        self._begin_job()
        self._read = bytearray()
        self._write(told)

    def send(self, key: Key, slot: int) -> None:
        """Send a job. If the process has died, the job is queued again when a new process replaces it."""
        if not self.jobs:
            self._begin_job()
        self.jobs.append((key, slot))
        self._write(JOB.pack(slot, *key))

    def _write(self, data: bytes) -> None:
        stdin: Any = self.process.stdin
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[stdin.write(view) :]

    def receive(self) -> bool:
        """Read the available output. Return False if the process has exited."""
        read = os.read(self.output.fileno(), 2**16)
        self._read += read
        return bool(read)

    def answers(self) -> list[tuple[int, int, str]]:
        """Return the complete responses that were read: slot, status, text."""
        found: list[tuple[int, int, str]] = []
        while len(self._read) >= ANSWER.size:
            slot, status, length = ANSWER.unpack_from(self._read)
            end = ANSWER.size + length
            if len(self._read) < end:
                break
            found.append((slot, status, self._read[ANSWER.size : end].decode("utf-8", "replace")))
            del self._read[:end]
        return found

    def done(self, slot: int) -> Key:
        """Remove and return the oldest job, which has the slot `slot`."""
        key, held = self.jobs.popleft()
        assert held == slot
        self._begin_job()
        return key

    def _begin_job(self) -> None:
        self._since, self._used_s = time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> float:
        try:
            used = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return used.user + used.system

    def end_if_hung(self) -> None:
        """Kill the process if its current job has run longer than `_LONGEST_JOB_S`, or computed for `_MAX_DECODE_S`."""
        if not self.jobs:
            return
        self.is_slow = self._cpu_s() - self._used_s > _MAX_DECODE_S
        if self.is_slow or time.monotonic() - self._since > _LONGEST_JOB_S:
            self.process.kill()

    def end(self) -> int:
        """Stop the process and return its exit code."""
        stdin: Any = self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        self.output.close()
        try:
            return self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _shared_memory(size: int, workers: int, smaller: str) -> int:
    """Return the descriptor of an anonymous file in memory, which is freed when the last process closes it.

    Raises DataError if there is not enough memory.
    """
    fd = -1
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("weft-samples")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # allocate now, since a failed allocation on write would kill the process
        return fd
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise DataError(
            f"data.workers={workers}: the {format_bytes(size)} of memory that they share cannot be had "
            f"({error.strerror or error}). Use fewer data.workers, a smaller task.options.{smaller}, or data.workers=0."
        ) from error


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


# Batched access to images and audio that separate processes decode.

_MOST_WORKERS = 8


class DecodedAhead:
    """Samples of a source, decoded ahead of use by processes that the first call to `many` starts.

    workers: number of processes, or 0 to decode in the rank.
    """

    def __init__(self, samples: Decodable, workers: int):
        self.samples, self.workers = samples, workers
        self._pool: DecodePool | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> tuple[Any, Any]:
        """Return the decoded value and the target of a sample in an epoch."""
        return self.samples.decoded(epoch, index), self.samples.learnt(index)

    def many(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[tuple[Any, Any]]:
        """Return samples, and decode others in the background.

        Args:
            wanted: (epoch, index) of each sample to return.
            soon: (epoch, index) of each sample to decode in the background. Ignored without processes.

        Raises:
            DataError: if a wanted sample cannot be decoded, or there is not enough memory for the processes.
        """
        if not self.workers:
            return [self.in_epoch(*key) for key in wanted]
        with self._lock:
            if self._pool is None:
                self._pool = DecodePool(self.samples, self.workers, len(wanted) + len(soon))
            made = self._pool.many(wanted, soon)
        return [(one, self.samples.learnt(index)) for one, (_, index) in zip(made, wanted, strict=True)]

    def pids(self) -> list[int]:
        """Return the ids of the running decode processes."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """Stop the processes. The next call to `many` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()


def usual_workers(num_ranks: int) -> int:
    """Return the number of decode processes for each rank of a machine: one for each spare core of the rank, 1 to 8.

    Even without a spare core there is one process, because a process can be killed if decoding takes too long.
    `num_ranks` is the number of ranks on this machine.
    """
    return max(1, min(_MOST_WORKERS, cores_of_rank(num_ranks) - 1))
