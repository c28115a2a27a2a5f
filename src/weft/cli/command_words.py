"""Positional arguments of commands that take a config: one file, and overrides."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from weft.errors import ConfigError, shown


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file, or None, and the overrides among a command's positional arguments.

    An argument with "=" that is not an existing file is an override.

    Raises:
        ConfigError: for a second file and for a file that does not exist.
    """
    overrides = [word for word in words if "=" in word and not _is_file(word)]
    files = [Path(word) for word in words if word not in overrides]
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]}: a second config file after {files[0]}. Give one file; settings are written key=value."
        )
    for path in files:
        if os.path.isdir(path):
            inside = path / "config.toml"
            hint = f"Use {inside}." if inside.is_file() else "Give the file inside it."
            raise ConfigError(f"{path}: this is a folder, not a config file. {hint}")
        if not _is_file(str(path)):
            raise ConfigError(f"{shown(str(path))}: there is no such file.{_file_hint(path)}")
    return (files[0] if files else None), overrides


def _is_file(text: str) -> bool:
    """Return True if the text names a file. Text that no file system accepts as a path names none."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _file_hint(path: Path) -> str:
    if path.suffix == "" and path.parent == Path("."):
        return f" Write a path to a TOML file, or a setting such as {shown(str(path))}=..."
    places = {path.parent, path.parent / "configs"}
    known = sorted(str(found) for place in places for found in place.glob("*.toml") if found.name != "pyproject.toml")
    near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Config files there: {', '.join(known[:5])}." if known else " Check the path."
