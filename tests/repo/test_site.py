"""The docs site: its nav, front page and Markdown. `make docs` builds it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import weft.train

DOCS = Path(__file__).parents[2] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))
HOOKS = runpy.run_path(str(DOCS / "mkdocs_hooks.py"))


def test_nav_lists_every_page_exactly_once():
    """A new page needs a line, or a pattern that matches it, in the nav of mkdocs.yml."""
    files = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(HOOKS["pages_in"](GENERATE["nav"]())) == sorted([*files, HOOKS["PYTHON_API"]])


def test_front_page_lists_the_pages_of_the_nav():
    page = (DOCS / "README.md").read_text()
    assert page == GENERATE["with_pages"](page), "run: python docs/generate.py"
    assert "](how-to/resume.md)" in page
    assert "](adr/" not in page


def test_plan_answer_is_that_of_the_command():
    answer = GENERATE["plan_answer"]()
    assert "\n1  " in answer
    for name in ("README.md", "how-to/plan.md"):
        assert answer in (DOCS / name).read_text(), "run: python docs/generate.py"


def test_python_api_has_every_public_name():
    page = HOOKS["python_api"]()
    assert [name for name in weft.__all__ if f"::: weft.{name}\n" not in page] == []
    assert set(HOOKS["TRAIN_NAMES"]) <= set(weft.train.__all__)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[a](../../src/weft/env.py#x)", "[a](https://host/weft/blob/main/src/weft/env.py)"),
        ("[a](../adr/)", "[a](https://host/weft/tree/main/docs/adr)"),
        ("[a](resume.md#failures) [b](https://pytorch.org) [c](#d)", None),
        ("Text:\n- one\n- two\n  more\n- three\n", "Text:\n\n- one\n- two\n  more\n- three\n"),
        ("Text\n| a |\n|---|\n| 1 |\n", "Text\n\n| a |\n|---|\n| 1 |\n"),
        ("```\ntext\n- [a](../../src)\n```\n", None),
    ],
)
def test_markdown_of_the_site(text, expected):
    assert HOOKS["site_markdown"](text, "how-to/plan.md", "https://host/weft/") == (expected or text)


def test_links_to_the_repository_become_text_without_its_address():
    assert HOOKS["site_markdown"]("see [a](../../README.md)", "how-to/plan.md", "") == "see a"
