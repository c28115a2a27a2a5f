"""Documentation is current: generated pages, links and commands in code blocks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", ["rules.md", "settings.md", "recipes.md", "benchmarks.md"])
def test_generated_pages_are_current(name):
    written = (ROOT / "docs" / "reference" / name).read_text()
    # In a separate process: other tests of this one register wire formats, which pages list.
    code = f"import runpy; print(runpy.run_path('docs/generate.py')['PAGES'][{name!r}](), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert written == made.stdout, "run: python docs/generate.py"


def test_links_have_targets():
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/start/first_run.md"])
def test_translated_pages_have_the_same_code_blocks(page):
    translated = ROOT / page.replace(".md", ".zh.md")
    assert [block for block in blocks(ROOT / page) if block not in blocks(translated)] == []


def weft_commands() -> list[str]:
    """Return every `weft train` and `weft config show` line of the fenced blocks, without comments."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            lines = [line.split("  #")[0].strip() for line in block.splitlines()]
            found += [line for line in lines if re.match(r"weft (train|config show)\b", line)]
    return sorted(set(found))


@pytest.mark.parametrize("command", weft_commands())
def test_commands_in_the_docs_are_accepted(command, monkeypatch):
    """Files and settings in the documentation exist."""
    from weft.cli.console import split_words
    from weft.config.files import load_config

    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(command.split(">")[0])[1:] if not word.startswith("--")]
    words = [word for word in words if word not in ("train", "config", "show") and word not in ("CONFIG", "FILE")]
    load_config(*split_words(words))
