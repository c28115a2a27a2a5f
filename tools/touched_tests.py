"""Print the test files that a change may affect, for `make test-touched`.

    python tools/touched_tests.py [BASE]    changes since BASE (default: the last commit of main), uncommitted ones too

A test file is affected if it, or a module that it imports directly or indirectly, has changed. A changed
`conftest.py`, or a file that is no module, such as a table in TOML, affects the modules of its folder and below. The
requirements affect all tests. Tests in `tests/cli` start `weft` as a command, so a change that affects `weft.cli` or
`weft.train` affects them all.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src/weft", "tests", "tools", "benchmarks")
#: Packages whose changes may affect every command.
_OF_COMMANDS = ("weft.cli", "weft.train")
_REQUIREMENTS = ("pyproject.toml", "constraints.txt")


def module_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


def imports_of(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules among `known` that a file imports, including those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def import_graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Return the source files by module, and the modules that each imports."""
    files = {module_of(path): path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))}
    return files, {name: set(imports_of(path, files)) & set(files) for name, path in files.items()}


def changed_since(base: str) -> set[Path]:
    """Return the files that differ from a commit, and untracked files."""
    listed = subprocess.check_output(["git", "diff", "--name-only", base], cwd=ROOT, text=True)
    listed += subprocess.check_output(["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT, text=True)
    return {ROOT / line for line in listed.splitlines()}


def touched(changed: set[Path]) -> list[Path]:
    """Return the test files that the changed files may affect."""
    files, graph = import_graph()
    parents = {parent for path in files.values() for parent in path.parents}
    folders = set[Path]()
    for path in changed:
        if path.suffix != ".py" or path.name == "conftest.py":
            folder = next(one for one in path.parents if one in parents)  # static files are below their modules
            folders |= {folder} if folder != ROOT or path.name in _REQUIREMENTS else set()
    affected = {name for name, path in files.items() if path in changed or folders & set(path.parents)}
    size = -1
    while size != len(affected):
        size = len(affected)
        affected |= {name for name, needed in graph.items() if needed & affected}
    commands = any(name.startswith(_OF_COMMANDS) for name in affected)
    return [
        path
        for name, path in files.items()
        if path.name.startswith("test_")
        and name.startswith("tests.")
        and (name in affected or name.startswith("tests.repo.") or (commands and name.startswith("tests.cli.")))
    ]


def main() -> None:
    """Print the affected test files, one per line."""
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    for path in touched(changed_since(base)):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
