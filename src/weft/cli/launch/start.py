"""Start of a run's processes: preloaded modules, the interface of starters, and the preparation of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft import env, errors
from weft.cli.console import print_line, progress_report
from weft.env import LOOPBACK
from weft.errors import LaunchError, Problem, WeftError

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig
    from weft.train.folder import RunFolder

_OF_EVERY_RANK = ("torch", "weft.train.engines.torch_engine", "weft.train.rank_run", "weft.monitor")
_OF_DECODERS = ("weft.train.tasks.decoder", "weft.models")
_OF_FOLDERS = ("transformers", "weft.train.tasks.folder_model", "weft.train.tasks", "weft.models")


def preloaded_modules(config: RunConfig) -> list[str]:
    """Return the modules that the fork server imports, in order. None of them is user code."""
    path = config.model.path
    if not path:
        return [*_OF_EVERY_RANK, *_OF_DECODERS]
    return [*_OF_EVERY_RANK, *_OF_FOLDERS, *_of_architecture(Path(path).expanduser())]


def _of_architecture(folder: Path) -> list[str]:
    """Return the modules of transformers for the model of a folder, or [] if its config names no architecture."""
    try:
        kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the run's checks report the problem
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        return []
    name = kind.replace("-", "_")
    return [f"transformers.models.{name}.{part}_{name}" for part in ("configuration", "modeling")]


# Processes of the ranks: starting, waiting, and reaping them after all have ended, so that no process id is reused.


class Starter(Protocol):
    """Starts the ranks of one machine, once per attempt."""

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """Start one process per rank.

        Args:
            ranks: environment of each rank, in addition to this process's own.

        Raises:
            OSError: if a process cannot be started.
        """
        ...

    def prepare(self, asked: Preparation) -> RunFolder:
        """Prepare the run, like `Preparation.prepare_locally`."""
        ...


class Started(Protocol):
    """Processes of started ranks. `pids` maps ranks to process ids. Each process leads a process group."""

    pids: dict[int, int]

    def wait(self, rank: int) -> int:
        """Wait until a rank's process ends, and return its exit code, negative for the number of a signal.

        Its process id is not reused before `close`.
        """
        ...

    def close(self) -> None:
        """Wait for all processes and reap them."""
        ...


class Programs:
    """Starts each rank as a separate program, and hosts their rendezvous store."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> Started:
        """Start one program per rank, and their rendezvous store."""
        from weft.comm.mesh import loopback_store

        # With port 0 the system chooses a free port, so that two runs on one machine never share a store.
        store = loopback_store(LOOPBACK, 0)
        return _Programs(self._command, ranks, store, store.port)

    def prepare(self, asked: Preparation) -> RunFolder:
        """Prepare the run in this process."""
        return asked.prepare_locally()


class _Programs:
    """Rank programs that this process started. They inherit only the standard streams."""

    def __init__(self, command: list[str], ranks: Mapping[int, Mapping[str, str]], store: object, port: int):
        self._store = store
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, variables in ranks.items():
                given = env.child_env(**variables, **env.own_rank(rank, len(ranks), port, os.getpid()))
                self._processes[rank] = subprocess.Popen(command, env=given, start_new_session=True)
        except OSError:
            for process in self._processes.values():
                process.kill()
                process.wait()
            raise
        self.pids = {rank: process.pid for rank, process in self._processes.items()}

    def wait(self, rank: int) -> int:
        process = self._processes[rank]
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return process.wait()
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def close(self) -> None:
        for process in self._processes.values():
            process.wait()


# Preparation before ranks start: choosing the plan and writing the run folder, here or in another process.


@dataclass(frozen=True)
class Preparation:
    """Inputs of the preparation of a run. The launcher has locked the run's folder."""

    config: RunConfig
    num_ranks: int
    num_local: int
    replica: int | None = None
    num_replicas: int = 1

    @property
    def loads_torch(self) -> bool:
        """True if checking the task needs torch. Text decoders do not need it."""
        return bool(self.config.model.path or self.config.task.name)

    def prepare_locally(self) -> RunFolder:
        """Prepare the run in this process.

        Download the hub files that the config names, choose the plan if it is "auto", and write the run folder.

        Raises:
            WeftError: the subclass for the problem.
        """
        from weft.train.folder import run_folder
        from weft.train.planned import chosen_line, record_choice, resolve_plan
        from weft.train.preparation import prepare_run
        from weft.train.states.hub_names import download_all, resolved_config

        config = resolved_config(self.config, run_folder(self.config, self.replica))
        download_all(config, print_line)
        config, chosen = resolve_plan(config, self.num_ranks, self.num_local)
        if chosen is not None:
            print_line(chosen_line(chosen))
        with progress_report(sys.stdout) as report:
            world_size = self.num_ranks * self.num_replicas
            folder = prepare_run(config, world_size, report, locked=True, replica=self.replica)
        if chosen is not None:
            record_choice(folder.path, self.config.plan, chosen)
        return folder

    def answered(self) -> dict[str, Any]:
        """Prepare the run and return the result as JSON values.

        In another process, `outcome` converts them to the folder, or raises the error.
        """
        try:
            folder = self.prepare_locally()
        except (WeftError, BrokenPipeError) as error:
            problems = [asdict(problem) for problem in getattr(error, "problems", ())]
            code = error.exit_code if isinstance(error, WeftError) else 1
            return {"kind": _kind(error), "text": str(error), "problems": problems, "exit_code": code}
        return {"path": str(folder.path), "texts": folder.texts}

    def written(self) -> dict[str, Any]:
        """Return the inputs as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "config": self.config.model_dump_json(by_alias=True)}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Preparation:
        """Return the inputs from the result of `written`."""
        from weft.config.run_config import RunConfig

        return cls(**{**written, "config": RunConfig.model_validate_json(written["config"], strict=False)})


def outcome(answer: Mapping[str, Any] | None, exit_code: int) -> RunFolder:
    """Return the folder that another process prepared.

    Args:
        answer: the result of `answered`; None if the process ended without a result.
        exit_code: exit code of that process, negative for the number of a signal.

    Raises:
        WeftError, BrokenPipeError: the error of the other process.
        LaunchError: if a signal ended it.
        SystemExit: for another failure, which the process has printed on standard error.
    """
    from weft.train.folder import RunFolder

    if answer is None:
        if exit_code >= 0:
            raise SystemExit(exit_code or 1)
        name = signal.Signals(-exit_code).name
        hint = " The kernel sends it where memory is short." if name == "SIGKILL" else ""
        raise LaunchError(f"{name} ended the process that prepared the run.{hint} Run the same command again.")
    if "path" in answer:
        return RunFolder(Path(answer["path"]), answer["texts"])
    if answer["kind"] == "BrokenPipeError":
        raise BrokenPipeError(answer["text"])
    raise _error(answer)


def _kind(error: BaseException) -> str:
    """Return the name of the first base class (or own class) that `_error` can create."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in ("weft.errors", "builtins"))


def _error(answer: Mapping[str, Any]) -> WeftError:
    kind: type[WeftError] = getattr(errors, answer["kind"])
    if issubclass(kind, errors.ConfigError | errors.PlanError):
        error: WeftError = kind([Problem(**problem) for problem in answer["problems"]])
    else:
        error = kind.__new__(kind)  # without __init__, because its arguments may differ from the message
        WeftError.__init__(error, answer["text"])
    error.exit_code = answer["exit_code"]
    return error
