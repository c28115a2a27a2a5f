"""Language of docstrings and comments: counts of unclear phrases, with ceilings that only fall.

`python tests/repo/test_prose.py PACKAGE` lists the marks of a package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
_NOUNS = (
    "is|was|are|were|it|they|each|this|a|the|all|ranks?|of|one|its|comes|goes|stands|keeps|makes|lets|holds"
    "|says|has|follows"
)
_SUBJECTS = "it|they|there|nothing|none|nobody|that|no|one|the|a|an|its|each|all|some|ranks|another"
#: Phrases by name. docs/contributing/terms.md has the terms to write instead.
PHRASES = {
    "'What X does' as a noun": rf"\b[Ww]hat (?:{_NOUNS})\b",
    "'where' for 'if' or 'when'": rf"\b[Ww]here (?:{_SUBJECTS})\b",
    "'x: of the ...'": r"[a-z_]+: of (?:the|this|a|an|all|each|its|what|one)\b",
    "people words for code": r"\b(?:[Ww]ho(?:ever)?|nobody|somebody|no one|people|persons?)\b",
    "says, tells, hears, sees": r"\b(?:say|says|said|tell|tells|told|hears?|heard|knows?|known|sees?|seen)\b",
    "lies, stands, goes on": r"\b(?:lie|lies|lay|stand|stands|stood|goes on|go on|comes? (?:back|out|first))\b",
    "beside, anew, alike, at once": r"\b(?:beside|besides|anew|alike|at once|so many|so much|equally often)\b",
    "of its own, by itself, that of": r"\b(?:of (?:its|their) own|by (?:itself|themselves)|that of|those of)\b",
    "has none": r"\b(?:is|are|has|have|had) none\b",
    "travel, meet, owe, settle, wish": r"\b(?:travels?|meets?|meetings?|owe[sd]?|debts?|settle[sd]?|wish(?:es)?)\b",
    "place, way, word, piece, stretch": r"\b(?:places?|ways?|words?|pieces?|stretch(?:es)?)\b",
}
#: Marks per 1,000 words that a package may have. Lower a number when a package improves. Never raise one.
CEILINGS: dict[str, float] = {
    ".": 1.8,
    "calibrate": 1.5,
    "checkpoint": 0.0,
    "cli": 1.1,
    "comm": 1.8,
    "config": 0.3,
    "data": 0.4,
    "devices": 0.0,
    "energy": 0.0,
    "experiments": 0.0,
    "federated": 0.0,
    "generation": 0.4,
    "hf": 0.0,
    "inference": 0.0,
    "interop": 0.0,
    "jax_engine": 0.0,
    "memory": 0.3,
    "models": 1.8,
    "monitor": 1.0,
    "optim": 0.9,
    "parallel": 1.9,
    "planner": 0.8,
    "pools": 0.0,
    "recommend": 0.0,
    "privacy": 0.0,
    "rl": 0.0,
    "train": 1.7,
    "verify": 1.2,
}


def texts_of(package: str) -> Iterator[tuple[Path, str]]:
    """Yield the docstrings and comments of a package; "." means the modules at the root."""
    paths = SOURCE.glob("*.py") if package == "." else (SOURCE / package).rglob("*.py")
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(paths):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, nodes) and (doc := ast.get_docstring(node)):
                yield path, doc
        yield from ((path, line.strip().lstrip("#: ")) for line in source.splitlines() if line.strip().startswith("#"))


def marks_in(text: str) -> list[str]:
    """Return the names of the phrases in a text, one for each occurrence."""
    return [name for name, pattern in PHRASES.items() for _ in re.findall(pattern, text)]


def rate(package: str) -> float:
    """Return the marks per 1,000 words."""
    texts = [text for _, text in texts_of(package)]
    num_words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    return 1000 * sum(len(marks_in(text)) for text in texts) / max(num_words, 1)


@pytest.mark.parametrize("package", CEILINGS)
def test_marks_do_not_increase(package):
    assert rate(package) <= CEILINGS[package], f"python tests/repo/test_prose.py {package} lists them"


def test_every_package_has_a_ceiling():
    assert set(CEILINGS) == {".", *(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())}


def test_mark_is_found():
    assert marks_in("What the ranks say where it is owed") != []
    assert marks_in("Return the sum of a tensor's elements over all ranks of an axis.") == []


if __name__ == "__main__":
    for where, found in ((path, text) for path, text in texts_of(sys.argv[1]) if marks_in(text)):
        print(f"{where.relative_to(SOURCE)}: {', '.join(marks_in(found))}: {' '.join(found.split())[:150]}")
