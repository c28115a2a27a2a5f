"""The planner's packages import nothing private of each other."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"


def test_nothing_private_is_imported():
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: from {node.module} import {each.name}"
        for path in SOURCE.rglob("*.py")
        if "weft.planner" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.planner")
        for each in node.names
        if each.name.startswith("_")
    ]
    assert not wrong
