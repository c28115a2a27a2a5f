"""Everything Weft can raise on purpose.

    WeftError
    ├── ConfigError (ValueError)       a config file or override breaks a rule; carries every problem found
    ├── PlanError (ValueError)         a plan cannot be parsed, or breaks a rule; carries every problem found
    ├── LayoutError (ValueError)       a layout does not fit the model
    ├── ModelError (ValueError)        a model's name or shape cannot be used
    ├── DataError (ValueError)         a source, record, column or tokenizer cannot be used
    ├── CheckpointError                nothing valid to load, or a file is damaged
    ├── CommError                      ranks cannot meet, or do not agree
    ├── LaunchError                    ranks could not be started, or the machine lacks what was asked for
    ├── TrainingHalted                 the run stopped itself: non-finite values, a limit
    ├── ActionAsked                    the run left its loop as asked: to be held, or to go back to an older checkpoint
    ├── OutOfMemory (MemoryError)      a rank has no memory left; the text lists what is live and what would help
    └── MissingExtra (ImportError)     an optional dependency is not installed

    WeftWarning (UserWarning)          training goes on, with other numbers than the user may expect

One grammar for every text: `<field>=<value>: <rule with the limit>. <what to type instead>.`
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class WeftError(Exception):
    """Base of all errors that Weft raises on purpose; the command line prints its text without a traceback."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake of the user: what it concerns, the sentence, and where it was typed.

    field: dotted key, such as "optimizer.lr". origin: "train.toml:14", "command line", or "" where unknown.
    """

    field: str
    message: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}" if self.origin else self.message


class _ListedError(WeftError, ValueError):
    """Base of errors that carry every mistake found: `problems`; the text has one line for each."""

    def __init__(self, problems: str | Iterable[Problem]):
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[_ListedError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(_ListedError):
    """A config breaks one rule or more; `problems` holds all of them, each with its origin."""


class PlanError(_ListedError):
    """A plan cannot be parsed, or breaks a rule; `problems` holds all of them, by the plan's fields."""


class LayoutError(WeftError, ValueError):
    """A layout does not fit the model."""


class ModelError(WeftError, ValueError):
    """A model's name or shape cannot be used."""


class DataError(WeftError, ValueError):
    """A source, record, column or tokenizer cannot be used."""


class CheckpointError(WeftError):
    """Nothing valid to load, or a checkpoint file is damaged."""


class UnfitError(CheckpointError):
    """What was to be saved is useless to train on. Nothing was committed."""


class CommError(WeftError):
    """Ranks cannot meet, or do not agree with each other. peer_ends: the other rank is known to run still, and to end.

    It may then finish what both had begun beside training.
    """

    exit_code = 1
    peer_ends = False


class LaunchError(WeftError):
    """Ranks could not be started, or the machine lacks what was asked for."""


class TrainingHalted(WeftError):
    """The run stopped itself before its weights were spoilt; the text names the cause and how to go on."""

    exit_code = 3


class ActionAsked(WeftError):
    """The run left its loop because a person, a page or an alert asked for it, on all ranks after the same step.

    Args:
        text: what is told.
        action: "hold": all is saved, and a person decides when it goes on; "roll_back": the next start goes on from an
            older checkpoint.
        step: the steps done.
    """

    def __init__(self, text: str, action: str = "hold", step: int | None = None):
        super().__init__(text)
        self.action, self.step = action, step
        # 75 (EX_TEMPFAIL) is what schedulers and torchrun take for "start again".
        self.exit_code = 3 if action == "hold" else 75


class OutOfMemory(WeftError, MemoryError):
    """A rank has no memory left. The same plan would end so again; the text lists what is live and what would help."""

    exit_code = 4


class MissingExtra(WeftError, ImportError):
    """An optional dependency is not installed; the text holds the pip command."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f"{package} is not installed: {purpose} needs it. {install_extra(extra)}.")
        self._arguments = (package, extra, purpose)

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), self._arguments


def install_extra(extra: str) -> str:
    """How to install one of Weft's extras, as a sentence without its full stop."""
    return f'In a checkout of Weft, run: pip install -e ".[{extra}]"'


class WeftWarning(UserWarning):
    """Training goes on, and its numbers may not be those that the user expects; the text says what to write."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, or '' when none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest known name, or '' when none is near."""
    near = nearest_name(name, known)
    return f" Did you mean '{near}'?" if near else ""


def shown(value: object) -> str:
    """The value in an error: on one line, and short."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "(a huge number)"  # str() of an int refuses thousands of digits
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
