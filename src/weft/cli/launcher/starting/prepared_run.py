"""What happens before ranks start: the plan is settled and the run folder written, here or in another process."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import errors
from weft.cli.console import progress_report, say
from weft.errors import LaunchError, Problem, WeftError

if TYPE_CHECKING:
    from weft.spec import RunConfig
    from weft.train import RunFolder


@dataclass(frozen=True)
class Preparation:
    """What is to be prepared, under a lock that the launcher holds.

    num_ranks: of this world. num_local: of them, on this machine. replica: which one this world is, where each is a
    world of its own. num_replicas: that are worlds of their own.
    """

    config: RunConfig
    num_ranks: int
    num_local: int
    replica: int | None = None
    num_replicas: int = 1

    @property
    def loads_torch(self) -> bool:
        """Whether the task needs torch to be checked. Decoders on text do not."""
        return bool(self.config.model.path or self.config.task.name)

    def here(self) -> RunFolder:
        """Choose the plan where it is left open, and write the folder, in this process.

        Raises:
            WeftError: the one of what is wrong.
        """
        from weft.train import prepare_run
        from weft.train.planned import chosen_line, record_choice, settle_plan

        config, chosen = settle_plan(self.config, self.num_ranks, self.num_local)
        if chosen is not None:
            say(chosen_line(chosen))
        with progress_report(sys.stdout) as report:
            world_size = self.num_ranks * self.num_replicas
            folder = prepare_run(config, world_size, report, locked=True, replica=self.replica)
        if chosen is not None:
            record_choice(folder.path, self.config.plan, chosen)
        return folder

    def answered(self) -> dict[str, Any]:
        """Return what `outcome` turns back, in another process, into the folder or error of `here`."""
        try:
            folder = self.here()
        except (WeftError, BrokenPipeError) as error:
            problems = [asdict(problem) for problem in getattr(error, "problems", ())]
            code = error.exit_code if isinstance(error, WeftError) else 1
            return {"kind": _kind(error), "text": str(error), "problems": problems, "exit_code": code}
        return {"path": str(folder.path), "texts": folder.texts}

    def written(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "config": self.config.model_dump_json(by_alias=True)}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Preparation:
        """Return what was written."""
        from weft.spec import RunConfig

        return cls(**{**written, "config": RunConfig.model_validate_json(written["config"], strict=False)})


def outcome(answer: Mapping[str, Any] | None, exit_code: int) -> RunFolder:
    """Return the folder that another process prepared.

    Args:
        answer: its `answered`; None where it ended without one.
        exit_code: of that process, below 0 for the number of a signal.

    Raises:
        WeftError: the one that it answered with.
        LaunchError: where a signal ended it.
        SystemExit: where it failed otherwise, which it has told on standard error.
    """
    from weft.train import RunFolder

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
    """The name of the nearest class that `_error` knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in ("weft.errors", "builtins"))


def _error(answer: Mapping[str, Any]) -> WeftError:
    kind: type[WeftError] = getattr(errors, answer["kind"])
    if issubclass(kind, errors.ConfigError | errors.PlanError):
        error: WeftError = kind([Problem(**problem) for problem in answer["problems"]])
    else:
        error = kind.__new__(kind)  # some make their text of other arguments
        WeftError.__init__(error, answer["text"])
    error.exit_code = answer["exit_code"]
    return error
