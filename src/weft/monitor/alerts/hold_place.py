"""A held run: who waits leaves a note in the run folder, and a person's word comes back through it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from weft.spec import RunConfig
from weft.spec.files import format_config, parse_config

#: Made by a person who wants a held run to go on (`touch`, `weft resume`); settings to change, one a line.
GO_ON = "go_on"
#: There while the run is held.
HELD = "held.json"


class HoldPlace:
    """The files by which a launcher and a person speak about a held run. folder: of the run."""

    def __init__(self, folder: Path):
        self._word, self._note = folder / GO_ON, folder / HELD

    @property
    def is_held(self) -> bool:
        """Whether a launcher waits there, as far as its note says."""
        return self._note.is_file()

    def begin(self, why: str, step: int | None) -> None:
        """Leave the note; a word from before does not count."""
        self._word.unlink(missing_ok=True)
        note = {"since": round(time.time(), 3), "step": step, "why": why, "pid": os.getpid()}
        with contextlib.suppress(OSError):  # the disk may be full, and the run waits all the same
            self._note.write_text(json.dumps(note, indent=1) + "\n")

    def word(self) -> list[str] | None:
        """Return the settings of a person's word, and take the word away; None where there is none yet."""
        try:
            text = self._word.read_text(errors="replace")
        except FileNotFoundError:
            return None
        self._word.unlink(missing_ok=True)
        return [line.strip() for line in text.splitlines() if line.strip()]

    def say(self, settings: Sequence[str]) -> None:
        """Give the word, whole or not at all."""
        draft = self._word.with_name(f".{GO_ON}.{os.getpid()}")
        draft.write_text("".join(f"{one}\n" for one in settings))
        os.replace(draft, self._word)

    def end(self) -> None:
        """Take the note away."""
        self._note.unlink(missing_ok=True)


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return the config with settings on top, checked like those of a command line.

    Raises:
        ConfigError: for a setting that breaks a rule.
    """
    return parse_config(format_config(config), "", settings).config if settings else config
