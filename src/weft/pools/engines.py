"""Executors of a pool: local:N, slurm:PARTITION, dask:HOST:PORT, or any executor of concurrent.futures."""

from __future__ import annotations

import logging
import math
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import env
from weft.errors import ConfigError, MissingExtra, PoolError, did_you_mean
from weft.pools.supervisor import assign, stop
from weft.units import counted

_FORMS = "Write local:4, slurm:PARTITION or dask:HOST:PORT"
#: Jobs of Slurm that wait or run at the same time, unless the address names another number.
_SLURM_JOBS = 64
#: Seconds between two looks at the results of Slurm's jobs.
_POLL_S = 0.5
#: Seconds that Slurm's limit adds to a task's, so that the task's applies first. submitit signals 90 s before the end.
_SLURM_MARGIN_S = 300.0
_CONNECT_S = "10s"
#: Short tasks that one call on Dask runs. Its scheduler takes milliseconds for each call.
_DASK_TASKS = 64
#: Tasks submitted at the same time to an engine whose number of workers may change.
_WINDOW = 64


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Workers that a pool needs.

    Attributes:
        on: address, such as "local:4".
        cores, gpus: cores and GPUs of a worker, or 0 to assign none.
        timeout_s: seconds that a task may take, or None.
        token: identifies the pool.
    """

    on: str
    cores: int
    gpus: int
    timeout_s: float | None
    token: str


@dataclass(frozen=True, slots=True)
class PoolEngine:
    """An executor, and its treatment by the pool.

    Attributes:
        executor: runs `run_tasks`.
        window: submissions at the same time.
        stop: kills the workers.
        problem: returns a sentence if the engine was lost with its tasks, else "".
        most_at_once: short tasks that one submission may have.
    """

    executor: Executor
    window: int
    stop: Callable[[], None]
    problem: Callable[[], str] = lambda: ""
    most_at_once: int = 1


def open_engine(request: PoolRequest, folder: Path) -> PoolEngine:
    """Return the engine at an address.

    Args:
        request: the workers.
        folder: folder for Slurm's job files, which all nodes share.

    Raises:
        ConfigError: if the address is malformed, or this machine has too few cores or GPUs.
        MissingExtra: if the engine's library is not installed.
        PoolError: if the engine cannot be reached.
    """
    kind, _, rest = request.on.partition(":")
    if kind == "local":
        return _local(request, rest)
    if kind == "dask":
        return _dask(request, rest)
    if kind == "slurm":
        return _slurm(request, rest, folder)
    near = did_you_mean(kind, ["local", "slurm", "dask"])
    raise ConfigError(f"on={request.on}: it has no engine {kind!r}.{near} {_FORMS}.")


def wrap_executor(executor: Executor, token: str) -> PoolEngine:
    """Return an engine on a caller's executor, which the pool does not shut down."""
    workers = getattr(executor, "_max_workers", None)
    return PoolEngine(executor, 2 * workers if isinstance(workers, int) else _WINDOW, lambda: stop(token))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_own_cores())


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _local(request: PoolRequest, rest: str) -> PoolEngine:
    own = _own_cores()
    if rest and not re.fullmatch(r"[1-9]\d{0,3}", rest):
        raise ConfigError(f"on={request.on}: the number of workers must be from 1 to 9999. Write local:4.")
    workers = int(rest) if rest else max(1, len(own) // max(1, request.cores))
    if workers * request.cores > len(own):
        needed, fit = f"{counted(workers, 'worker')} of {counted(request.cores, 'core')}", len(own) // request.cores
        raise ConfigError(
            f"cores={request.cores}: {needed} do not fit the {len(own)} of this machine. "
            + (f"Use --on local:{fit}, or fewer cores." if fit else f"Use at most --cores {len(own)}.")
        )
    gpus = visible_gpus() if request.gpus else []
    if workers * request.gpus > len(gpus):
        needed = f"{counted(workers, 'worker')} of {counted(request.gpus, 'GPU')}"
        fit = len(gpus) // request.gpus
        raise ConfigError(
            f"gpus={request.gpus}: {needed} do not fit the {len(gpus)} of this machine. "
            + (f"Use --on local:{fit}." if fit else "Leave out --gpus.")
        )
    slots: queue.SimpleQueue[tuple[tuple[int, ...], dict[str, str]]] = queue.SimpleQueue()
    for n in range(workers):
        variables: dict[str, str] = {}
        if not env.get("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(request.cores or max(1, len(own) // workers))
        if request.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[n * request.gpus : (n + 1) * request.gpus])
        slots.put((tuple(own[n * request.cores : (n + 1) * request.cores]), variables))
    executor = ThreadPoolExecutor(workers, "weft-pool", initializer=lambda: assign(*slots.get()))

    def stop_all() -> None:
        stop(request.token)
        executor.shutdown(cancel_futures=True)

    return PoolEngine(executor, 4 * workers, stop_all)


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs for CUDA_VISIBLE_DEVICES, without torch."""
    said = env.get("CUDA_VISIBLE_DEVICES", "unset")
    if said != "unset":
        return [name.strip() for name in said.split(",") if name.strip() not in ("", "-1")]
    import pynvml

    try:
        pynvml.nvmlInit()
        return [str(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _dask(request: PoolRequest, rest: str) -> PoolEngine:
    if not re.fullmatch(r"[\w.\-\[\]:]+:\d{1,5}", rest):
        raise ConfigError(f"on={request.on}: it needs a scheduler's host and port. Write dask:HOST:8786.")
    if request.cores:
        raise ConfigError(
            f"cores={request.cores}: a Dask worker gets its cores where it starts. "
            "Leave out --cores, and use dask worker --nworkers and --nthreads."
        )
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtra("distributed", "dask", "a pool on Dask") from error
    try:
        client: Any = Client(f"tcp://{rest}", timeout=_CONNECT_S, set_as_default=False)
    except OSError as error:
        raise PoolError(
            f"on={request.on}: no Dask scheduler answers there. Start one, or check the address."
        ) from error
    with suppress(TimeoutError):
        client.wait_for_workers(1, timeout=_CONNECT_S)
    threads = sum(client.nthreads().values())
    resources = {"GPU": request.gpus} if request.gpus else None
    infos = client.scheduler_info(n_workers=-1)["workers"].values()
    if not threads or (request.gpus and all(i["resources"].get("GPU", 0) < request.gpus for i in infos)):
        client.close()
        what = f'with {request.gpus} GPUs. Start one with --resources "GPU={request.gpus}"' if threads else ""
        raise PoolError(f"on={request.on}: it has no worker {what or '. Start one: dask worker ' + rest}.")
    executor = client.get_executor(pure=False, retries=0, resources=resources)

    # The pool reports a lost scheduler in a sentence; these loggers print tracebacks.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("distributed", "tornado", "asyncio")):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def stop_all() -> None:
        executor.shutdown(wait=False)
        if client.status == "running":
            client.run(stop, request.token, on_error="ignore")
        client.close(timeout=2)

    def problem() -> str:
        return "" if client.status == "running" else f"on={request.on}: the connection to the Dask scheduler was lost"

    return PoolEngine(executor, max(_WINDOW, 4 * threads), stop_all, problem, _DASK_TASKS)


def _slurm(request: PoolRequest, rest: str, folder: Path) -> PoolEngine:
    match = re.fullmatch(r"([\w.\-]+)(?::([1-9]\d{0,4}))?", rest)
    if match is None:
        raise ConfigError(f"on={request.on}: it needs a partition. Write slurm:PARTITION or slurm:PARTITION:JOBS.")
    if request.timeout_s is None:
        raise ConfigError(f"on={request.on}: jobs of Slurm need a time limit. Add --timeout 1h.")
    try:
        import submitit
    except ImportError as error:
        raise MissingExtra("submitit", "slurm", "a pool on Slurm") from error
    if missing := [name for name in ("sbatch", "srun", "sacct", "scancel") if shutil.which(name) is None]:
        raise PoolError(f"on={request.on}: this machine has no {missing[0]}. Run the command on a login node.")
    executor = submitit.SlurmExecutor(folder / "slurm")
    parameters: dict[str, Any] = {
        "partition": match[1],
        "time": math.ceil((request.timeout_s + _SLURM_MARGIN_S) / 60),
        "job_name": "weft-map",
        "cpus_per_task": request.cores or None,
        "gpus_per_node": request.gpus or None,
        "stderr_to_stdout": True,
    }
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
    jobs = SubmititExecutor(executor, folder / "slurm")
    jobs.cancel_earlier()
    return PoolEngine(jobs, int(match[2] or _SLURM_JOBS), lambda: jobs.shutdown(cancel_futures=True))


class SubmititExecutor(Executor):
    """A submitit executor as an executor of concurrent.futures.

    Args:
        executor: submitit's, for Slurm or local.
        folder: its folder. `jobs.txt` in it lists submitted jobs, so that a later command can cancel them.
    """

    def __init__(self, executor: Any, folder: Path):
        self._executor, self._list = executor, folder / "jobs.txt"
        self._jobs: dict[Future[Any], Any] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weft-slurm", daemon=True)
        self._watcher.start()

    def cancel_earlier(self) -> None:
        """Cancel the jobs of an earlier command that was killed."""
        if self._list.is_file():
            for job_id in self._list.read_text("ascii").split():
                self._executor.job_class(self._list.parent, job_id).cancel(check=False)
            self._list.unlink()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call as a job.

        Raises:
            PoolError: if the job is rejected.
        """
        try:
            job = self._executor.submit(fn, *args, **kwargs)
        except Exception as error:  # submitit's errors share no base
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise PoolError(f"Slurm rejected a job: {reason[-1]}. Check partition and limits.") from error
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._list.open("a", encoding="ascii") as file:
            file.write(f"{job.job_id}\n")
        with self._lock:
            self._jobs[future] = job
        return future

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            with self._lock:
                waiting: Mapping[Future[Any], Any] = dict(self._jobs)
            for future, job in waiting.items():
                try:
                    if not job.done():
                        continue
                    outcome, error = job.result(), None
                except Exception as raised:  # a lost job; the library's errors share no base
                    outcome, error = None, raised
                with self._lock:
                    self._jobs.pop(future, None)
                if error is None:
                    future.set_result(outcome)
                else:
                    future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for jobs, or cancel them."""
        while wait and not cancel_futures and self._jobs:
            time.sleep(_POLL_S)
        self._over.set()
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.cancel(check=False)
        self._list.unlink(missing_ok=True)
