"""Every file is type-checked. Exceptions name the rule that they ignore, and the reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.repo.source import SOURCE

STRICT = ("config", "planner", "comm", "models/inspect", "interop")


def ignores() -> list[tuple[str, str]]:
    """Return the file and the comment of every exception."""
    return [
        (path.relative_to(SOURCE).as_posix(), line[line.index("#") :].strip())
        for path in sorted(Path(SOURCE).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"#\s*(type|pyright):\s*ignore", line)
    ]


def test_exception_names_its_rule():
    blind = [name for name, comment in ignores() if not re.search(r"pyright: ignore\[\w+(, ?\w+)*\]", comment)]
    assert not blind


def test_exception_has_a_reason():
    assert not [f"{name}: {comment}" for name, comment in ignores() if comment.endswith("]")]


def test_no_file_is_excluded_and_strict_packages_stay_strict():
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["include"] == ["src/weft", "tools"]
    assert not {"ignore", "exclude"} & settings.keys()
    assert {f"src/weft/{room}" for room in STRICT} <= {*settings["strict"]}
