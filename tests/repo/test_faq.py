"""The FAQ quotes messages that Weft still prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text()
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.M)


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Return every string of the sources, with '...' for the values of f-strings."""
    found: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_faq_has_at_least_twenty_messages():
    assert len(QUOTED) == len(set(QUOTED)) >= 20


@pytest.mark.parametrize("text", QUOTED)
def test_quoted_message_is_in_the_sources(text, messages):
    parts = text.split("...")
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.S)
    near = [
        message for message in messages if all(part in message for part in parts)
    ]  # the pattern without this filter takes seconds
    assert any(pattern.search(message) for message in near), f"docs/faq.md quotes what no source says: {text}"
