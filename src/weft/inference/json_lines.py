"""Files with one JSON object per line, and errors that name their bad lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import ConfigError, DataError, Problem

Line = TypeVar("Line")

#: Bad lines that an error lists.
_MOST_LISTED = 5


def read_lines(path: Path, option: str, forms: str, parse: Callable[[int, dict[str, Any]], Line]) -> list[Line]:
    """Read a JSONL file. Empty lines are skipped.

    Args:
        path: the file.
        option: name of the option that gives it, for errors.
        forms: remedy that lists the forms of a line.
        parse: called with the number of a line from 1 and its object. Raises ValueError with the rule that it breaks.

    Raises:
        DataError: if the file cannot be read or has no lines.
        ConfigError: with each bad line and its number.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"--{option}={path}: it cannot be read ({error.strerror}). Give a JSONL file.") from error
    found: list[Line] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(parse(number, _object(line, forms)))
        except ValueError as error:
            problems.append(Problem(option, f"{error}.", f"{path}:{number}"))
    refuse_lines(problems)
    if not found:
        raise DataError(f"--{option}={path}: it has no lines. {forms}.")
    return found


def refuse_lines(problems: Sequence[Problem]) -> None:
    """Raise ConfigError with the first problems, if there are any, and the number of the others."""
    if not problems:
        return
    more = len(problems) - _MOST_LISTED
    rest = [Problem(problems[0].field, f"and {more} more bad lines.")] if more > 0 else []
    raise ConfigError([*problems[:_MOST_LISTED], *rest])


def _object(line: bytes, forms: str) -> dict[str, Any]:
    """Return the object of a line. Raise ValueError for other JSON."""
    try:
        said: Any = json.loads(line)
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which UTF-8 cannot store. Remove it") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8. Save the file as UTF-8") from None
    except RecursionError:
        raise ValueError(f"it is nested too deep. {forms}") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error}). {forms}") from None
    if not isinstance(said, dict):
        raise ValueError(f"not an object. {forms}")
    return said
