"""The docs site: patterns in the nav of mkdocs.yml, Markdown as GitHub reads it, and the page of the Python API."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PYTHON_API = "reference/python.md"
#: Names that tasks and hooks of users need from `weft.train`.
TRAIN_NAMES = ("Task", "Metric", "Hook", "Progress", "StepMetrics")


def expanded(nav: list[Any]) -> list[Any]:
    """Return a nav with the pages that match its patterns."""
    pages = []
    for entry in nav:
        if isinstance(entry, dict):
            pages += [{title: expanded(part) if isinstance(part, list) else part} for title, part in entry.items()]
        elif "*" in entry:
            pages += [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob(entry))]
        else:
            pages.append(entry)
    return pages


def pages_in(nav: list[Any] | str) -> list[str]:
    """Return the pages of an expanded nav, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = [part for entry in nav for part in (entry.values() if isinstance(entry, dict) else [entry])]
    return [page for part in parts for page in pages_in(part)]


def python_api() -> str:
    """Return the page of the Python API: one directive of mkdocstrings for each public name."""
    source = (DOCS.parent / "src" / "weft" / "__init__.py").read_text()
    lists = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    names = next(ast.literal_eval(node.value) for node in lists if ast.unparse(node.targets[0]) == "__all__")
    lines = ["# Python API", "Generated from the docstrings. [Public names](api.md) has an overview.", "", "## weft"]
    lines += [f"\n::: weft.{name}" for name in names]
    lines += ["", "## weft.train: tasks and hooks", *(f"\n::: weft.train.{name}" for name in TRAIN_NAMES)]
    return "\n".join(lines) + "\n"


def site_markdown(text: str, page: str, repository: str) -> str:
    """Return a page in the Markdown of the site.

    Lists and tables get the empty line before them that GitHub does not need. Links to folders and to files outside
    docs/ lead to the repository; without its address they become plain text.
    """

    def outside(link: re.Match[str]) -> str:
        label, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        is_folder = (DOCS.parent / path).is_dir()
        if "://" in target or target.startswith("#") or (path.startswith("docs/") and not is_folder):
            return link[0]
        address = f"{repository.rstrip('/')}/{'tree' if is_folder else 'blob'}/main/{path}"
        return f"[{label}]({address})" if repository else label

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):  # between blocks of code
        parts[i] = re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", outside, parts[i])
        starts = r"^((?![-*|#] |\d+\. |\|)\S.*\n)(?=[-*] |\d+\. |\|)"
        parts[i] = re.sub(starts, r"\1\n", parts[i], flags=re.MULTILINE)
    return "".join(parts)


def on_config(config: Any) -> None:
    """Expand the patterns in the nav."""
    config.nav = expanded(config.nav)


def on_files(files: Any, config: Any) -> None:
    """Add the page of the Python API."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PYTHON_API, content=python_api()))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change a page into the Markdown of the site. Pages for contributors rank last in a search, settings first."""
    if page.file.src_uri.startswith(("adr/", "contributing/", "map.md")):
        page.meta["search"] = {"boost": 0.1}
    elif page.file.src_uri == "reference/settings.md":
        page.meta["search"] = {"boost": 10}
    elif page.file.src_uri == "start/questions.md":
        page.meta["search"] = {"exclude": True}  # it would be the first result of its own questions
    return site_markdown(markdown, page.file.src_uri, config.repo_url or "")
