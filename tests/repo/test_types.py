"""Every file is type-checked. Exceptions name the rule that they leave out, and say why."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.repo.source import SOURCE

STRICT = ("config", "planner", "comm", "models/inspect", "interop")


def ignores() -> list[tuple[str, str]]:
    """The file and the comment of every exception."""
    return [
        (path.relative_to(SOURCE).as_posix(), line[line.index("#") :].strip())
        for path in sorted(Path(SOURCE).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"#\s*(type|pyright):\s*ignore", line)
    ]


def test_an_exception_names_its_rule():
    blind = [name for name, comment in ignores() if not re.search(r"pyright: ignore\[\w+(, ?\w+)*\]", comment)]
    assert not blind


def test_an_exception_says_why():
    assert not [f"{name}: {comment}" for name, comment in ignores() if comment.endswith("]")]


def test_no_file_is_left_out_and_the_strict_rooms_stay_strict():
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["include"] == ["src/weft", "tools"]
    assert not {"ignore", "exclude"} & settings.keys()
    assert {f"src/weft/{room}" for room in STRICT} <= {*settings["strict"]}
