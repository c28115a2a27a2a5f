"""One line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

#: fail: training cannot work here. warn: it works, or works only in part, and something is worth changing.
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One fact about the machine. remedy: what to do, where status is not ok."""

    section: str
    name: str
    text: str
    status: Status = "ok"
    remedy: str = ""


#: A part of the examination.
Check = Callable[[], Iterable[CheckLine]]


def examine(section: str, check: Check) -> list[CheckLine]:
    """The lines of one check; where the machine does not even let itself be read, one line that says so."""
    try:
        return list(check())
    # A report about unknown machines must come to its end; what could not be read is itself a finding, and is shown.
    except Exception as error:
        text = f"could not be read ({type(error).__name__}: {error})"
        return [CheckLine(section, check.__name__, text, "warn", "Please report this line.")]
