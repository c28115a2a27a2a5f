"""wishes.jsonl: what a person, an alert or a page asks of a run. Who may write the run folder may ask.

The first rank reads it and sees to it that every rank does the same after the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from weft.errors import ConfigError, did_you_mean

WISHES = "wishes.jsonl"
RunAction = Literal["checkpoint", "hold", "stop", "lower_lr", "skip_data", "roll_back", "tell"]
#: What a run can be asked for; "tell" shows a line and nothing else.
RUN_ACTIONS: tuple[str, ...] = get_args(RunAction)
#: What lower_lr multiplies the learning rate by where nobody says.
_USUAL_FACTOR = 0.5


@dataclass(frozen=True, slots=True)
class Wish:
    """One request.

    why: in words, for people. by: who asks: "alert NAME", "a person". since: the first step of the trouble, counted
    from 1; None: the last one. factor: of lower_lr.
    """

    action: str
    why: str = ""
    by: str = "a person"
    since: int | None = None
    factor: float = _USUAL_FACTOR

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Wish:
        """Read what `ask` wrote; unknown keys are passed over.

        Raises:
            ValueError: for what is no wish.
        """
        known = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        wish = cls(**known)
        since_fits = wish.since is None or (type(wish.since) is int and wish.since >= 0)
        factor_fits = isinstance(wish.factor, int | float) and 0 < wish.factor <= 1
        if wish.action not in RUN_ACTIONS or not since_fits or not factor_fits:
            raise ValueError("not a wish")
        return wish

    def as_json(self) -> dict[str, object]:
        """Return it as `from_json` reads it."""
        return asdict(self)


def ask(folder: Path, wish: Wish) -> None:
    """Ask the run in a folder for something; it hears of it within a second, if it trains.

    Raises:
        ConfigError: for an unknown action, and where the folder cannot be written.
    """
    if wish.action not in RUN_ACTIONS:
        raise ConfigError(
            f"action={wish.action}: a run cannot do this.{did_you_mean(wish.action, RUN_ACTIONS)} "
            f"Use one of {', '.join(RUN_ACTIONS)}."
        )
    line = json.dumps({"time": round(time.time(), 3), **wish.as_json()}) + "\n"
    try:
        mode = folder.stat().st_mode & 0o666  # as private as its folder
        handle = os.open(folder / WISHES, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot ask this run for anything ({error.strerror}). Check the path.") from error


class WishBox:
    """Reads the wishes of one run, each once, over its starts: a file beside them keeps what was heard.

    Args:
        folder: of the run.
        since: what was asked before (s since 1970) was meant for an earlier command.
    """

    def __init__(self, folder: Path, since: float = 0.0):
        self._path, self._heard = folder / WISHES, folder / f".{WISHES}.heard"
        self._since = since
        try:
            self._offset = min(int(self._heard.read_text()), self._size())
        except (OSError, ValueError):
            self._offset = 0

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def new(self) -> list[Wish]:
        """Return what was asked since the last call; a line that is none is passed over."""
        if self._size() <= self._offset:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        with contextlib.suppress(OSError):  # of a full disk: the next start may hear it again
            self._heard.write_text(f"{self._offset}\n")
        return [wish for line in whole.splitlines() if (wish := _read(line, self._since)) is not None]


def action_line(step: int, wish: Wish) -> str:
    """Return what the terminal shows of a wish that all ranks have heard."""
    does = {
        "checkpoint": "saves a checkpoint",
        "hold": "saves and is held",
        "stop": "saves and stops",
        "lower_lr": f"goes on with the learning rate times {wish.factor:g}",
        "skip_data": "goes back, and leaves out the data of the steps since",
        "roll_back": "goes back to an older checkpoint",
    }
    why = f": {wish.why}" if wish.why else ""
    if wish.action == "tell":
        return f"{wish.by}{why}"
    return f"step {step}: the run {does[wish.action]}, as {wish.by} asks{why}"


def _read(line: bytes, since: float) -> Wish | None:
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or found.get("time", since) < since:
            return None
        return Wish.from_json(cast(Mapping[str, Any], found))
    except (ValueError, TypeError):
        return None
