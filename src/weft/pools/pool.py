"""`weft.pool(...).map(function, items)`, and the loop that submits tasks and records their outcomes."""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.errors import ConfigError, PoolError, TasksFailed, shown
from weft.pools.engines import PoolEngine, PoolRequest, open_engine, wrap_executor
from weft.pools.supervisor import MapJob, run_tasks
from weft.pools.task_folder import TaskFolder, open_folder
from weft.pools.worker import refuse_nested_pool, unfit_part
from weft.units import counted, parse_seconds

#: Seconds between two checks whether the engine was lost.
_LOOK_S = 0.5
#: Seconds of tasks that are submitted together if the engine takes several.
_SUBMITTED_S = 0.2
#: Called after each outcome: report(outcome, folder).
Report = Callable[[dict[str, Any], TaskFolder], None]


@dataclass(frozen=True, slots=True)
class _Task:
    index: int
    item: str
    attempt: int = 1


class Pool:
    """Workers that call functions with JSON items. Use it in a `with` block, or call `close`.

    Args:
        on: "local:4", "slurm:PARTITION", "dask:HOST:PORT", or an executor of concurrent.futures, which stays open.
        cores: cores of each worker; 0 assigns none.
        gpus: GPUs of each worker; 0 assigns none.
        timeout: seconds that a task may take, or a text such as "10min"; None for no limit.
        retries: how many times a task is tried again after its worker died or its time was over.
        retry_errors: try a task again after an exception, too.

    Raises:
        ConfigError: if an argument is invalid.
    """

    def __init__(
        self,
        on: str | Executor = "local",
        *,
        cores: int = 0,
        gpus: int = 0,
        timeout: str | float | None = None,
        retries: int = 2,
        retry_errors: bool = False,
    ):
        refuse_nested_pool()
        if not isinstance(on, str | Executor):
            raise ConfigError(f"on={shown(on)}: it must be a text or an executor. Use on='local:4'.")
        for name, value, most in (("cores", cores, 10_000), ("gpus", gpus, 1000), ("retries", retries, 10**6)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise ConfigError(f"{name}={shown(value)}: it must be a whole number from 0 to {most}. Use {name}=2.")
        self._on, self._cores, self._gpus = on, cores, gpus
        self._timeout_s = _limit_of(timeout)
        self._retries, self._retry_errors = retries, retry_errors
        self._engine: PoolEngine | None = None
        self._token = uuid.uuid4().hex

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()
            self._token = uuid.uuid4().hex

    def map(
        self, function: Callable[[Any], Any] | str, items: Iterable[Any], folder: str | Path | None = None
    ) -> list[Any]:
        """Return the function's result for each item, in order. Failed tasks do not stop others.

        Args:
            function: a function of a module or script, or its name as package.module:function.
            items: values that JSON has.
            folder: keeps results. The same call continues after an interruption.

        Raises:
            TasksFailed: after all tasks have run, if some failed. It has the results of the others.
            ConfigError: if the function or an item cannot be used, or the folder belongs to another map.
            PoolError: if the workers cannot be reached, or the disk is full.
        """
        name, texts = function if isinstance(function, str) else name_of(function), texts_of(items)
        refuse_malformed_name(name)
        if folder:
            return self._map_in(Path(folder), name, texts)
        if isinstance(self._on, str) and self._on.startswith("slurm"):
            raise ConfigError(f"on={self._on}: Slurm's jobs need a folder that all nodes share. Give folder=.")
        with tempfile.TemporaryDirectory(prefix="weft-map-") as temporary:
            return self._map_in(Path(temporary), name, texts)

    def _map_in(self, path: Path, name: str, texts: Iterable[str]) -> list[Any]:
        with open_folder(path, name, texts) as folder:
            self.run(name, folder)
            outcomes = list(folder.outcomes())
        errors = {n: one["error"] for n, one in enumerate(outcomes) if "error" in one}
        results = [one.get("result") for one in outcomes]
        if errors:
            raise TasksFailed(failure_text(outcomes), results, errors)
        return results

    def run(self, function: str, folder: TaskFolder, report: Report = lambda outcome, folder: None) -> None:
        """Run the tasks that a folder lacks, then write its ordered results.

        Args:
            function: the function's name.
            folder: an open folder of the function and its items.
            report: called after each outcome.

        Raises:
            ConfigError, PoolError: as for `map`.
        """
        if folder.num_done < folder.num_items:
            if self._engine is None:
                self._engine = self._open(folder.path)
            job = MapJob(self._token, function, os.getcwd(), tuple(sys.path), self._timeout_s).text()
            try:
                self._run(job, folder, self._engine, report)
            except BaseException:
                self.close()
                raise
        folder.write_results()

    def _open(self, folder: Path) -> PoolEngine:
        if isinstance(self._on, Executor):
            return wrap_executor(self._on, self._token)
        return open_engine(PoolRequest(self._on, self._cores, self._gpus, self._timeout_s, self._token), folder)

    def _run(self, job: str, folder: TaskFolder, engine: PoolEngine, report: Report) -> None:
        ended: queue.SimpleQueue[Future[list[str]]] = queue.SimpleQueue()
        running: dict[Future[list[str]], list[_Task]] = {}
        again: deque[_Task] = deque()
        fresh = (_Task(index, item) for index, item in folder.missing())
        mean_s, left = math.inf, folder.num_items - folder.num_done  # not yet submitted
        while True:
            while len(running) < engine.window:
                # Tasks that are tried again are submitted alone: one of them may take its worker down.
                count = min(engine.most_at_once, left // engine.window, int(_SUBMITTED_S / max(mean_s, 1e-9)))
                tasks = [again.popleft()] if again else list(islice(fresh, max(1, count if self._retries else 1)))
                if not tasks:
                    break
                left -= len(tasks)
                future = _submit(engine.executor, job, [task.item for task in tasks])
                running[future] = tasks
                future.add_done_callback(ended.put)
            if not running:
                return
            future = _next_ended(ended, engine)
            tasks = running.pop(future)
            for task, outcome in zip(tasks, _outcomes_of(future, len(tasks)), strict=True):
                seconds = outcome.get("seconds", math.inf)
                mean_s = seconds if math.isinf(mean_s) else 0.8 * mean_s + 0.2 * seconds
                if self._is_retried(outcome, task, job):
                    again.append(replace(task, attempt=task.attempt + 1))
                    continue
                del outcome["kind"]
                log = outcome.pop("output", "")
                folder.add(task.index, {**outcome, "attempts": task.attempt}, log)
                report({"item": task.index, **outcome, "attempts": task.attempt}, folder)

    def _is_retried(self, outcome: dict[str, Any], task: _Task, job: str) -> bool:
        """Return True if a task is to be tried again. Raise ConfigError if its function cannot be used."""
        kind = outcome.setdefault("kind", None)
        if kind == "import":
            raise ConfigError(f"function={json.loads(job)['function']}: its module fails.\n{outcome['traceback']}")
        if kind == "unusable":
            text = outcome["error"] if outcome["error"].endswith("?") else outcome["error"] + "."
            raise ConfigError(f"function={json.loads(job)['function']}: {text}")
        retried = kind in ("died", "timeout") or (kind == "raised" and self._retry_errors)
        return retried and task.attempt <= self._retries


def _submit(executor: Executor, job: str, items: list[str]) -> Future[list[str]]:
    try:
        return executor.submit(run_tasks, job, items)
    except (BrokenExecutor, RuntimeError) as error:
        raise PoolError(f"the executor takes no more tasks ({error}). Make a new one.") from error


def _next_ended(ended: queue.SimpleQueue[Future[list[str]]], engine: PoolEngine) -> Future[list[str]]:
    while True:
        try:
            return ended.get(timeout=_LOOK_S)
        except queue.Empty:
            if problem := engine.problem():
                raise PoolError(f"{problem}. Run the same command when it is back: finished tasks are kept.") from None


def _outcomes_of(future: Future[list[str]], count: int) -> list[dict[str, Any]]:
    """Return the outcomes of a future's tasks. An engine that lost them has an exception instead."""
    try:
        return [json.loads(outcome) for outcome in future.result()]
    except PoolError:
        raise
    except BrokenExecutor as error:
        raise PoolError(f"the executor takes no more tasks ({error}). Make a new one.") from error
    except Exception as error:  # of any engine: a lost worker or node
        text = str(error).strip().partition("\n")[0]
        lost = f"its worker was lost ({type(error).__name__}: {text[:300]})"
        return [{"kind": "died", "error": lost} for _ in range(count)]


def _limit_of(timeout: str | float | None) -> float | None:
    if timeout is None:
        return None
    try:
        limit_s = parse_seconds(timeout)
    except ValueError as error:
        raise ConfigError(f"timeout={timeout}: {error}.") from error
    if not 0 < limit_s <= 10**8:
        raise ConfigError(f"timeout={timeout}: it must be above 0 and at most 1000 days. Leave it out for no limit.")
    return limit_s


def failure_text(outcomes: Iterable[dict[str, Any]], listed: int = 3) -> str:
    """Return a summary of failed tasks with the first tracebacks."""
    failed = [one for one in outcomes if "error" in one]
    lines = [f"{counted(len(failed), 'task')} failed. Run the same command to try them again."]
    for one in failed[:listed]:
        tried = f" (tried {one['attempts']} times)" if one["attempts"] > 1 else ""
        lines.append(f"item {one['item']}: {one['error']}{tried}")
        lines += [one["traceback"].rstrip()] if "traceback" in one else []
    return "\n".join(lines + ([f"and {len(failed) - listed} more"] if len(failed) > listed else []))


def texts_of(items: Iterable[Any]) -> Iterator[str]:
    """Yield each item as JSON on one line.

    Raises:
        ConfigError: if JSON lacks an item's type.
    """
    for n, item in enumerate(items):
        if unfit := unfit_part(item, "it"):
            raise ConfigError(f"items[{n}]: {unfit}, which JSON lacks. Use numbers, texts, lists and dicts.")
        yield json.dumps(item)


def name_of(function: Callable[[Any], Any]) -> str:
    """Return the name by which a worker can import a function.

    Raises:
        ConfigError: if it is not a function at the top of a module or script.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    home = getattr(function, "__module__", None)
    module = sys.modules.get(home or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise ConfigError(
            f"function={shown(name)}: workers import a function by its name, and this one has no name in a module. "
            "Define it with def at the top of a module or script."
        )
    if home != "__main__":
        return f"{home}:{name}"
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return f"{spec.name}:{name}"
    if not file or not file.endswith(".py") or not Path(file).is_file():
        raise ConfigError(
            f"function={name}: workers cannot import functions of an interactive session. Define it in a file."
        )
    return f"{Path(file).resolve()}:{name}"


def refuse_malformed_name(name: str) -> None:
    """Raise ConfigError if a name is not `module:function`."""
    home, _, function = name.rpartition(":")
    if not home or not function.isidentifier():
        raise ConfigError(f"function={name}: it has no function's name. Write package.module:function.")


#: `weft.pool`.
pool = Pool
