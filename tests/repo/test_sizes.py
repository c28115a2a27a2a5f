"""Size limits: no file above 600 lines, no function above 60."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 600, 60


@pytest.fixture(scope="module")
def nodes() -> dict[Path, list[tuple[str, int, int]]]:
    """Return the functions and `global` statements of each file: name, first and last line; no name for `global`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Global)
    return {
        path: [
            (getattr(one, "name", ""), one.lineno, one.end_lineno or one.lineno)
            for one in ast.walk(ast.parse(path.read_text()))
            if isinstance(one, kinds)
        ]
        for path in FILES
    }


def test_files_and_functions_are_within_their_size_limits(nodes):
    too_long = []
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > MOST_LINES:
            too_long.append(f"{path.relative_to(SOURCE)}: {len(text.splitlines())} lines")
        for name, first, last in nodes[path]:
            if name and last - first + 1 > MOST_FUNCTION_LINES:
                too_long.append(f"{path.relative_to(SOURCE)}: {name} has {last - first + 1} lines")
    assert not too_long


def test_no_function_rebinds_a_module_name(nodes):
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in FILES for name, line, _ in nodes[path] if not name]
    assert not found
