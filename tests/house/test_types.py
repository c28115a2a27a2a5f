"""Exceptions from type checking name the rule that they leave out; in the rooms that are strict they say why too."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_doors import SOURCE

STRICT = ("spec/", "planner/", "comm/", "mesh/", "structure/")


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


def test_an_exception_in_a_strict_room_says_why():
    bare = [f"{name}: {comment}" for name, comment in ignores() if name.startswith(STRICT) and comment.endswith("]")]
    assert not bare
