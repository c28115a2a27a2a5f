"""Size limits: no file above 600 lines, no function above 60."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 600, 60


def test_files_and_functions_are_within_their_size_limits():
    too_long = []
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > MOST_LINES:
            too_long.append(f"{path.relative_to(SOURCE)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(SOURCE)}: {node.name} has {length} lines")
    assert not too_long


def test_no_function_rebinds_a_module_name():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: global {', '.join(node.names)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not found
