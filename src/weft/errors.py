"""Exceptions that Weft raises on purpose.

    WeftError
    ├── ConfigError (ValueError)       a config file or override breaks a rule; lists every problem found
    ├── PlanError (ValueError)         a plan cannot be parsed, or breaks a rule; lists every problem found
    ├── LayoutError (ValueError)       a layout does not fit the model
    ├── ModelError (ValueError)        a model's name or shape cannot be used
    ├── DataError (ValueError)         a source, record, column or tokenizer cannot be used
    ├── CheckpointError                nothing valid to load, or a file is damaged
    ├── CommError                      ranks cannot connect, or disagree
    ├── LaunchError                    ranks could not be started, or the machine lacks a requested resource
    ├── TrainingHalted                 the run stopped: non-finite values, a limit
    │   └── StepRefused                a step could not begin, such as for lack of rewards; the run pauses
    ├── ActionAsked                    the run stopped on request: to pause, or to roll back to an older checkpoint
    ├── PoolError                      a pool's workers cannot be reached, or its disk is full
    │   └── TasksFailed                tasks of a pool failed; the others have results
    ├── OutOfMemory (MemoryError)      a rank is out of memory; the message lists the memory in use and fixes
    └── MissingExtra (ImportError)     an optional dependency is not installed

    WeftWarning (UserWarning)          training continues, with other numbers than the user may expect

Every message has the form `<field>=<value>: <rule with the limit>. <what to type instead>.`
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class WeftError(Exception):
    """Base of all errors that Weft raises on purpose. The command line prints the message without a traceback."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in the user's config or command.

    Attributes:
        field: dotted key, such as "optimizer.lr".
        message: sentence that describes the problem and the fix.
        origin: "train.toml:14", "command line", or "" if unknown.
    """

    field: str
    message: str
    origin: str = ""

    @classmethod
    def of(cls, field: str, value: object, rule: str) -> Problem:
        """Return the problem with the message "<field>=<value>: <rule>". The rule ends with a suggested fix.

        Args:
            field, value, rule: the dotted key, its value, and the rule with the fix.
        """
        return cls(field, f"{field}={value}: {rule}")

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}" if self.origin else self.message


class _ListedError(WeftError, ValueError):
    """Base of errors that list every mistake found in `problems`. The message has one line for each."""

    def __init__(self, problems: str | Iterable[Problem]):
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[_ListedError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(_ListedError):
    """A config breaks one rule or more. `problems` has all of them, each with its origin."""


class PlanError(_ListedError):
    """A plan cannot be parsed, or breaks a rule. `problems` has all of them, by the plan's fields."""


class LayoutError(WeftError, ValueError):
    """A layout does not fit the model."""


class ModelError(WeftError, ValueError):
    """A model's name or shape cannot be used."""


class DataError(WeftError, ValueError):
    """A source, record, column or tokenizer cannot be used."""


class CheckpointError(WeftError):
    """There is no valid checkpoint to load, or a file of one is damaged."""


class UnfitError(CheckpointError):
    """The state to save is unusable, such as non-finite weights. No checkpoint was committed."""


class CommError(WeftError):
    """Ranks cannot connect to each other, or disagree.

    `peer_ends` is True if the other rank has failed but is still running. A pending save, which needs both ranks, may
    then be completed before they exit.
    """

    exit_code = 1
    peer_ends = False


class LaunchError(WeftError):
    """Ranks could not be started, or the machine lacks a requested resource."""


class TrainingHalted(WeftError):
    """The run stopped before its weights were damaged. The message has the cause and how to continue."""

    exit_code = 3


class StepRefused(TrainingHalted):
    """A step could not begin, on all ranks, because of its data. The last step's weights are unchanged."""


class ActionAsked(WeftError):
    """The run left its loop on request of a user, the dashboard or an alert, on all ranks after the same step.

    Args:
        text: the message.
        action: "hold": the run has saved and pauses until the user continues it. "roll_back": the next start continues
            from an older checkpoint.
        step: number of steps done.
    """

    def __init__(self, text: str, action: str = "hold", step: int | None = None):
        super().__init__(text)
        self.action, self.step = action, step
        # With exit code 75 (EX_TEMPFAIL), schedulers and torchrun start the job again.
        self.exit_code = 3 if action == "hold" else 75


class PoolError(WeftError):
    """A pool's workers cannot be reached, or its folder cannot be written. Finished tasks are kept."""


class TasksFailed(PoolError):
    """Tasks of a pool failed after all retries. All other tasks have run.

    Args:
        text: the message, with tracebacks.
        results: the result of each item, None for failed ones.
        errors: the error by the index of its item.
    """

    exit_code = 1

    def __init__(self, text: str, results: list[Any], errors: dict[int, str]):
        super().__init__(text)
        self.results, self.errors = results, errors

    def __reduce__(self) -> tuple[type[TasksFailed], tuple[str, list[Any], dict[int, str]]]:
        return type(self), (str(self), self.results, self.errors)


class OutOfMemory(WeftError, MemoryError):
    """A rank is out of memory and would be again with this plan. The message lists memory in use and fixes."""

    exit_code = 4


class MissingExtra(WeftError, ImportError):
    """An optional dependency is not installed. The message has the pip command.

    Args:
        package, extra, purpose: the package, Weft's extra that installs it, and the feature that needs it.
    """

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{package} is not installed: {purpose} needs it. {install_extra(extra)}.")
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), self._arguments


def install_extra(extra: str) -> str:
    """Return a sentence without its period that explains how to install one of Weft's extras."""
    return f'In a checkout of Weft, run: pip install -e ".[{extra}]"'


class WeftWarning(UserWarning):
    """Training continues, but its numbers may differ from the user's expectation. The message suggests a fix."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the element of `known` that was probably meant, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar element of `known`, or "" if none is similar."""
    near = nearest_name(name, known)
    return f" Did you mean '{near}'?" if near else ""


def shown(value: object) -> str:
    """Return a value for an error message: short and on one line."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "(a huge number)"  # str() of an int raises an error for thousands of digits
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
